"""URLs of the operator console; every view is an `operator_view`."""

from django.urls import path

from apps.interfaces.staff import (
    audit,
    catalog,
    home,
    search,
    tenants,
    viewing,
)
from apps.interfaces.staff.machines import calibrations, capacity, pools, replicas, workers
from apps.interfaces.staff.money import books, payments

app_name = "staff"

urlpatterns = [
    path("", home.show, name="home"),
    path("audit", audit.index, name="audit"),
    path("pools", pools.index, name="pool_list"),
    path("pools/<str:pool_id>", pools.detail, name="pool_detail"),
    path("pools/<str:pool_id>/capacity", capacity.set_capacity, name="pool_capacity"),
    path("pools/<str:pool_id>/token", pools.issue_token, name="pool_token"),
    path("pools/<str:pool_id>/calibrations", calibrations.index, name="pool_calibrations"),
    path("pools/<str:pool_id>/calibrations/use", calibrations.use, name="calibration_use"),
    path("pools/<str:pool_id>/calibrations/follow", calibrations.follow, name="calibration_follow"),
    path("workers/revoke", workers.revoke, name="worker_revoke"),
    path("workers/<str:worker_id>", workers.detail, name="worker_detail"),
    path("workers/<str:worker_id>/cordon", workers.act, {"action": "cordon"}, name="worker_cordon"),
    path("workers/<str:worker_id>/uncordon", workers.act, {"action": "uncordon"}, name="worker_uncordon"),
    path("workers/<str:worker_id>/drain", workers.act, {"action": "drain"}, name="worker_drain"),
    path("replicas", replicas.index, name="replica_list"),
    path("replicas/<str:replica_id>", replicas.detail, name="replica_detail"),
    path("replicas/<str:replica_id>/drain", replicas.drain, name="replica_drain"),
    path("replicas/<str:replica_id>/accept", replicas.accept, name="replica_accept"),
    path("replicas/<str:replica_id>/room", replicas.accept_room, name="replica_accept_room"),
    path("replicas/<str:replica_id>/clear", replicas.clear, name="replica_clear"),
    path("base-models", catalog.base_models, name="base_model_list"),
    path("base-models/lookups", catalog.look_up, name="base_model_look_up"),
    path("base-models/lookups/<str:lookup_id>", catalog.show_lookup, name="hub_lookup"),
    path("base-models/<str:base_model_id>/install", catalog.install_base_model, name="base_model_install"),
    path("base-models/retire", catalog.retire, name="base_model_retire"),
    path("prices", catalog.prices, name="price_list"),
    path("prices/requests/<str:request_id>", catalog.decide_price, name="price_decide"),
    path("payments", payments.index, name="payment_list"),
    path("payments/<str:topup_id>/refund", payments.refund, name="payment_refund"),
    path("payments/refunds/<str:refund_id>", payments.decide, name="refund_decide"),
    path("payments/differences/<str:difference_id>/resolve", payments.resolve, name="difference_resolve"),
    path("books", books.show, name="books"),
    path("organizations/<str:organization_id>", tenants.organization, name="organization_detail"),
    path("organizations/<str:organization_id>/adjust", books.adjust, name="adjustment_create"),
    path("credit-requests/<str:request_id>/decline", books.decline, name="credit_request_decline"),
    path("adjustments/<str:adjustment_id>", books.decide, name="adjustment_decide"),
    path("margin", books.margin, name="margin"),
    path("organizations/<str:organization_id>/suspend", tenants.suspend, name="organization_suspend"),
    path("organizations/<str:organization_id>/reinstate", tenants.reinstate, name="organization_reinstate"),
    path("organizations/<str:organization_id>/view", viewing.start, name="organization_view"),
    path("viewing/stop", viewing.stop, name="viewing_stop"),
    path("quotas", tenants.quotas, name="quota_list"),
    path("quotas/<str:organization_id>", tenants.quota, name="quota_edit"),
    path("jobs", tenants.jobs, name="job_list"),
    path("jobs/<str:job_id>", tenants.job, name="job_detail"),
    path("jobs/<str:job_id>/cancel", tenants.cancel_job, name="job_cancel"),
    path("jobs/<str:job_id>/continue", tenants.continue_job, name="job_continue"),
    path("search", search.show, name="search"),
    path("organizations", tenants.organizations, name="organization_list"),
]
