"""URLs of /internal/v1."""

from django.urls import path

from apps.interfaces.worker_api import views

urlpatterns = [
    path("enroll", views.enroll),
    path("claim", views.claim),
    path("probes", views.report_probe),
    path("probes/missing", views.list_missing_probes),
    path("rehearsals", views.report_rehearsal),
    path("rehearsals/next", views.take_rehearsal),
    path("examinations", views.report_examination),
    path("examinations/next", views.take_examination),
    path("conversions/next", views.take_conversion),
    path("conversions/<str:conversion_id>/heartbeat", views.keep_conversion),
    path("conversions/<str:conversion_id>/uploads", views.create_conversion_upload),
    path("conversions/<str:conversion_id>/finish", views.finish_conversion),
    path("leases/<str:lease_id>/heartbeat", views.heartbeat),
    path("leases/<str:lease_id>/member/heartbeat", views.keep_place),
    path("leases/<str:lease_id>/member/leave", views.leave),
    path("leases/<str:lease_id>/events", views.report_events),
    path("leases/<str:lease_id>/uploads", views.create_upload),
    path("leases/<str:lease_id>/judge", views.open_judge),
    path("leases/<str:lease_id>/finish", views.finish),
    path("metrics", views.metrics),
    path("replicas/<str:replica_id>/desired", views.desired),
    path("replicas/<str:replica_id>/observed", views.observed),
]
