"""uvicorn compared.emit_conquiet:web, and conquiet run compared.emit_conquiet:app"""

from fastapi import FastAPI

from compared.tables import DATABASE, Order, OrderPlaced, PlaceOrder
from conquiet import App

app = App("shop", DATABASE, broker="redis://localhost")
web = FastAPI()


@web.post("/orders", status_code=201)
def place_order(order: PlaceOrder) -> None:
    with app.sessions.begin() as session:
        session.add(Order(id=order.id))
        app.emit(session, OrderPlaced(id=order.id))
