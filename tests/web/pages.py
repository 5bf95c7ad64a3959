"""Addresses of pages that several tests open."""

from django.urls import reverse

from apps.datasets.models import DatasetVersion


def page_of(version: DatasetVersion, **query: object) -> str:
    address = reverse("web:dataset_detail", args=[version.pk])
    return address + "?" + "&".join(f"{name}={value}" for name, value in query.items())
