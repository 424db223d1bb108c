"""The pages at /dashboard: what is going on, what it costs, and every single request.

``pages/`` has one module for each page: it asks the ledger (``reader``, in a thread of its own) and the gateway's
memory (``live``), and renders a template. ``view`` holds what a viewer has chosen: filters, time zone, colours.
"""
