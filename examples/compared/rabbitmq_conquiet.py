"""conquiet run compared.rabbitmq_conquiet:app"""

from sqlalchemy.orm import Session

from compared.tables import DATABASE, Invoice, OrderPlaced
from conquiet import App

app = App("billing", DATABASE, broker="amqp://localhost")


@app.on(topic="shop")
def bill(placed: OrderPlaced, session: Session) -> None:
    session.add(Invoice(order=placed.id))
