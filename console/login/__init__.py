"""The login to the pages, and its sessions.

Each page begins with ``session = await login.require(request)``. Without a session it redirects to /login. A change
that another site's page requests is refused.
"""
