"""Place an order: the row and its event are committed together, or neither is."""

import json

from django.db import IntegrityError, transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from shop.messages import OrderPlaced, app
from shop.models import Order


@csrf_exempt  # type: ignore[untyped-decorator]  # a service for services: no browser, no cookie
@require_POST  # type: ignore[untyped-decorator]
def place_order(request: HttpRequest) -> JsonResponse:
    order = json.loads(request.body)
    try:
        with transaction.atomic():
            Order.objects.create(id=order["id"], amount=order["amount"])
            app.emit(OrderPlaced(order["id"], order["amount"]))
            if order["amount"] < 0:
                raise ValueError("the amount is negative")  # order and event are both undone
    except IntegrityError:
        return JsonResponse({"error": f"order {order['id']} exists"}, status=409)
    except ValueError as error:
        return JsonResponse({"error": str(error)}, status=422)
    return JsonResponse({"id": order["id"]}, status=201)
