"""The address of the shop, and the admin."""

from django.contrib import admin
from django.urls import path

from shop.views import place_order

urlpatterns = [path("orders", place_order), path("admin/", admin.site.urls)]
