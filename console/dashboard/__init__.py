"""The pages at /dashboard: live state, cost, and every single request.

``pages/`` has one module for each page: it queries the ledger (``reader``, in a separate thread) and the gateway's
memory (``live``), and renders a template. ``view`` holds the viewer's choices: filters, time zone, colors.
"""
