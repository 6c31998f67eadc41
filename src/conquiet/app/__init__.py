"""An app: name, database and broker in one object, with its router, workers and relay."""

from conquiet.app.app import App
from conquiet.app.client import Client
from conquiet.app.injection import Depends
from conquiet.schedule import Tick

__all__ = ["App", "Client", "Depends", "Tick"]
