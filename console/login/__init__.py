"""Pages for people, rendered here, and who may see them.

Whoever builds a page takes ``session = await login.require(request)`` as its first step: without a login it is
answered by the way to /login, and a change asked for by another site's page is refused.
"""
