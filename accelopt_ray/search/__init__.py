"""The search: beam, experience memory and the loop around them, written against a protocol and free of Ray.

:func:`~accelopt_ray.search.loop.run_search` is the entrance; the rules it follows are plain functions over frozen
records, one decision to a module.
"""
