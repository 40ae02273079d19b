"""/admin: what an operator reads and changes. Every path needs a key with the scope `admin`."""

from app.admin import fleet, keys, policies, rollouts, stats, updates

ROUTERS = tuple(part.router for part in (stats, rollouts, updates, policies, keys, fleet))
"""Each has the whole prefix itself: a router inside a router loses it in the metrics' route label."""
