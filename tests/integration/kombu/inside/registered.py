"""The sitecustomize of Celery's suite: the workers that its tests start know our scheme."""

import conquiet.kombu  # noqa: F401
