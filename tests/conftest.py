"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# The same examples each time, so that a change is judged by what it changed; and no deadline, which would be a timed
# assertion. To search for new examples: pytest --hypothesis-profile search
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("repeatable")
