"""The endpoint of Stripe's webhooks: it verifies, stores and answers them; a task handles them."""

from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from apps.core.errors import DomainError
from apps.interfaces.web.shell.access import public_view
from apps.payments import webhooks
from apps.payments.stripe import gateway


@csrf_exempt
@require_POST
@public_view
def receive(request: HttpRequest) -> HttpResponse:
    """Store one webhook. The signature is the credential; Stripe repeats every webhook not answered with 200."""
    if not gateway.is_configured():
        return HttpResponse(status=404)
    try:
        webhooks.receive(body=request.body, signature=request.headers.get("Stripe-Signature", ""))
    except DomainError as error:
        return HttpResponse(error.message, status=400, content_type="text/plain")
    return HttpResponse(status=200)
