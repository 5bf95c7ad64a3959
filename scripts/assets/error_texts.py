"""The meaning and the fix of each error code: the texts of docs/errors.md.

The codes and their statuses are read from the source (`error_codes.py`). A test fails for a code without a text here.
"""

from typing import NamedTuple


class Words(NamedTuple):
    """`meaning` says what happened; `fix` says what the reader can do."""

    meaning: str
    fix: str


_REPEAT = "Send it again after the time in `Retry-After`. OpenAI's clients do so by themselves."
_FIND = "Check the id, and that the key belongs to the organization that owns the object."
_NOT_YOURS = "It is unknown, deleted, or belongs to another organization. The answer is the same in all three cases."

ERRORS: dict[str, Words] = {
    "adapter_rejected": Words(
        "The uploaded files are not an adapter that an engine can serve on this base model.",
        "The message names the file and the key. Upload files that PEFT wrote for the same base model.",
    ),
    "address_unverified": Words(
        "Your own email address is not confirmed yet.",
        "Open the link in the confirmation email, or request another one in your profile.",
    ),
    "alias_moved": Words(
        "The alias does not stand for the `expected_version` that you sent, or a canary of it has begun.",
        "Read the alias, decide again, and send the version that it stands for now.",
    ),
    "already_member": Words("The person is already a member of the organization.", "Change their role instead."),
    "answer_too_large": Words(
        "Your organization's answers in progress take all the memory that they may have. This one was charged as far "
        "as it was written.",
        "Ask for fewer or shorter answers at a time, or stream them.",
    ),
    "base_model_refused": Words(
        "A base model cannot be used safely, or the hub refuses it.",
        "The message gives the reason. Choose another model, another revision or another token.",
    ),
    "batch_not_found": Words(f"No batch has this id. {_NOT_YOURS}", _FIND),
    "calibration_not_found": Words("The pool has no calibration with this number.", "List the pool's calibrations."),
    "cannot_launch": Words(
        "The pool, or every pool, cannot take the job now.",
        "The message gives the reason. Choose another pool, or start the job later.",
    ),
    "capture_above_hold": Words(
        "A charge exceeds the amount that was held for it. Customers never receive this code.",
        "Report it to the developers, with the log.",
    ),
    "card_declined": Words(
        "The bank declined the card.",
        "Use another card, or ask your bank. If the bank asks you to confirm the payment, pay on the credit page.",
    ),
    "checkpoint_not_found": Words(
        "The checkpoint to start from no longer exists.",
        "List the checkpoints of the job and choose one of them, or start from the base model.",
    ),
    "completion_not_found": Words(
        f"No stored completion has this id. {_NOT_YOURS}",
        "Check the id. A completion is stored only if it was requested with `store: true`.",
    ),
    "completion_too_large": Words(
        "The answer to a request with `store: true` is too large to be stored. It was written, so it is charged.",
        "Lower `max_tokens` or `n`, or leave out `store`.",
    ),
    "context_length_exceeded": Words(
        "The prompt and the longest possible answer do not fit into the model's context.",
        "Shorten the messages, or lower `max_tokens`. The message names the limits that are known.",
    ),
    "engine_error": Words("The model failed in the middle of an answer. You are not charged for it.", _REPEAT),
    "eval_not_found": Words(f"No eval has this id. {_NOT_YOURS}", _FIND),
    "file_in_use": Words(
        "A job or batch that has not ended reads the file.", "Cancel the job or batch, or wait until it ends."
    ),
    "file_not_found": Words(f"No file has this id. {_NOT_YOURS}", _FIND),
    "file_not_ready": Words(
        "The file is not validated yet, has errors, or is deleted.",
        "Wait until its status is `processed`. If it is `error`, fix the rows that its problems name.",
    ),
    "file_not_repairable": Words(
        "The file has no bad rows that can be dropped or repaired.", "Fix the file yourself and upload it again."
    ),
    "file_still_validating": Words("The file is still being validated, so its rows cannot be used yet.", _REPEAT),
    "file_too_large": Words(
        "The file exceeds the size limit, and was not kept.",
        "Split it into several files. A file of "
        "training rows can also be compressed, or sent in parts to `/v1/uploads`.",
    ),
    "files_unread": Words(
        "The platform is still reading the files that a worker delivered. Only workers receive this code.",
        "Nothing: the worker repeats the call.",
    ),
    "fine_tuning_job_not_found": Words(f"No fine-tuning job has this id. {_NOT_YOURS}", _FIND),
    "hub_unavailable": Words(
        "The model hub did not answer, or it limits your requests.", "Try again in a few minutes."
    ),
    "idempotency_in_progress": Words(
        "The first request with this `Idempotency-Key` has not been answered yet.", _REPEAT
    ),
    "idempotency_key_reused": Words(
        "The `Idempotency-Key` was already used for another request.",
        "Use a new key for each new request. Repeat a key only with the same address and body.",
    ),
    "insufficient_permissions": Words(
        "The key lacks the scope, its creator lacks the role, or the organization is suspended.",
        "Use a key with the scope in `required_scope`, or ask an owner of the organization.",
    ),
    "insufficient_quota": Words(
        "A limit of the organization is reached: quota, allowance, credit, budget, storage, or a number of objects.",
        "The message names the limit. Add credit, raise the budget, delete what you no longer need, or wait if it is "
        "a limit of an hour or a day.",
    ),
    "internal_error": Words(
        "Starting the job failed because of a problem on our side. Nothing is charged.", "Start the job again."
    ),
    "invalid_api_key": Words(
        "The key is missing, malformed, unknown, revoked or expired.",
        "Send `Authorization: Bearer ann_…` with a current key. The base URL and the key must belong to the same "
        "installation.",
    ),
    "invalid_checksum": Words("The bytes received do not match the MD5 that you sent.", "Upload the parts again."),
    "invalid_json": Words(
        "The body is not JSON, or contains a value that cannot be stored.",
        "Send UTF-8 JSON with `Content-Type: application/json`. The message says where the error is.",
    ),
    "invalid_multipart": Words(
        "The body is not a multipart form, or part of it is missing.",
        "Send `multipart/form-data` with the boundary that the header names. SDKs do this for you.",
    ),
    "invalid_request": Words("The request could not be understood.", "Compare it with the API reference."),
    "invalid_signature": Words(
        "The signed address was altered, belongs to something else, or has expired. For Stripe's events: the signature "
        "is wrong.",
        "Request a new address. Do not change any part of it.",
    ),
    "invalid_state": Words(
        "The object is in a state that does not allow this. Repeating the request does not help.",
        "Read the object. Its status and the message tell you what is possible.",
    ),
    "invalid_training_file": Words(
        "The file cannot be trained on with this model and these settings.",
        "The message names the line and the fix. Upload the fixed file, or change the setting.",
    ),
    "invalid_value": Words(
        "A field has a value that is not allowed.", "`param` names the field, and the message lists the allowed values."
    ),
    "invalid_worker_credential": Words(
        "A worker's credential or one-time token is not valid, or is no longer valid.",
        "If you are an operator, create a new token on the page of the pool and enrol the worker again.",
    ),
    "invitation_closed": Words(
        "The invitation was accepted or withdrawn, or has expired.", "Ask the organization for a new invitation."
    ),
    "item_not_found": Words(f"The run has no output item with this id. {_NOT_YOURS}", _FIND),
    "job_too_large": Words(
        "No pool can hold the job.",
        "The message describes what fits: usually a shorter `max_length`, QLoRA, or a smaller model.",
    ),
    "key_already_rotated": Words(
        "Another key replaced this one, and this one ends soon.",
        "Rotate the key that the message names, or create another one.",
    ),
    "key_not_active": Words(
        "The key is revoked or has expired, so it cannot be rotated or changed.", "Create another key."
    ),
    "last_owner": Words("An organization must keep at least one owner.", "Make another member an owner first."),
    "licence_not_accepted": Words(
        "No member of this organization has accepted the model's licence, which is required.",
        "Accept it on the model's page, or with `POST /api/v1/models/{model}/licence`.",
    ),
    "already_converted": Words(
        "The model already exists in this form.", "Download it: `GET /api/v1/models/{model}/files` lists its files."
    ),
    "base_model_gone": Words(
        "A conversion needs the base model's files, and the base model is no longer installed.",
        "Ask the operator to install it again.",
    ),
    "conversion_unavailable": Words(
        "No trainer of this installation can make this form, or the size of the result is unknown.",
        "Choose the other form, or ask the operator.",
    ),
    "no_trainable_tokens": Words(
        "When the rows are cut to `max_length`, no row of the training file has a token left to train on.",
        "Set `max_length` to `least_max_length` or more. It is the lowest value with which a row has a token to "
        "train on.",
    ),
    "precondition_failed": Words(
        "What `If-Match` names has changed since you read it. Nothing was done.",
        "Read it again, decide again, and send the change with the new ETag.",
    ),
    "push_refused": Words(
        "The hub does not let the token write to the repository.", "Use a token with write access to the repository."
    ),
    "push_unavailable": Words(
        "This installation does not push to a hub.", "Download the files, and upload them with `hf upload`."
    ),
    "price_raised": Words("The price rose after you saw it.", "Look at the new price, then confirm it."),
    "maximum_raised": Words(
        "The job's maximum price rose after you saw it.", "Look at the new price, then confirm it."
    ),
    "method_not_allowed": Words(
        "The address exists, but not for this HTTP method.", "Use a method that the header `Allow` lists."
    ),
    "mismatched_project": Words(
        "The header `OpenAI-Project` does not name the project of the API key.",
        "Leave the header out, send the key's own project, or use a key of the project that you want. The page "
        "*Projects* shows the ids.",
    ),
    "missing_required_parameter": Words("A field is missing.", "Send the field that `param` names."),
    "model_not_found": Words(
        f"No model has this name. {_NOT_YOURS}",
        "`GET /v1/models` lists the names that this key can use. You can use an adapter once its job has succeeded.",
    ),
    "model_not_installed": Words(
        "The model is listed for quotes, but its tokenizer, template or weights are not installed here.",
        "Choose an installed model, or ask the operator to install it.",
    ),
    "model_not_supported": Words(
        "The model exists, but cannot do this: all models here generate text.", "Use `/v1/chat/completions`."
    ),
    "newer_version": Words(
        "The dataset has a version that you have not seen.", "Read the newest version and apply your edit to it."
    ),
    "no_place_left": Words(
        "All places for models that stay warm are taken.",
        "Stop keeping another model warm, or ask the operator for more places.",
    ),
    "not_found": Words(f"There is no such object. {_NOT_YOURS}", _FIND),
    "not_offered": Words(
        "This part of OpenAI's API does not exist here.",
        "The page on [moving to Anneal](migrating.md) and the API reference list what exists.",
    ),
    "object_exists": Words("Another file was already stored under this signed address.", "Request a new address."),
    "object_missing": Words("The stored object is gone or was never written.", "Upload it again."),
    "payment_refused": Words(
        "The payment provider refused the payment. The same request never succeeds.",
        "The message gives the reason. Check the payment details.",
    ),
    "payments_unavailable": Words("The payment provider did not answer.", _REPEAT),
    "price_not_set": Words(
        "No operator has set a price for the model, so it is not served.", "Ask the operator. Waiting does not help."
    ),
    "project_not_found": Words(
        "No project that you can see has this id. It is unknown, deleted, private, or belongs to another organization. "
        "The answer is the same in all four cases.",
        "List the projects that you can see, and send the id of one of them.",
    ),
    "query_timeout": Words(
        "The database took too long for this request, so it was stopped. It changed nothing.",
        "Ask for less: a shorter period, a lower `limit`, or a filter or search that matches fewer rows.",
    ),
    "rate_limit_exceeded": Words(
        "You sent too many requests or tokens in this minute, have too many requests open at once, or made too many "
        "changes in this hour.",
        f"{_REPEAT} The headers `x-ratelimit-*` of inference requests show what is left.",
    ),
    "region_refused": Words(
        "The organization is limited to regions, and this object is in another one.",
        "The message names both regions. Choose a pool or a model in your regions, or ask the operator of the "
        "installation.",
    ),
    "request_failed": Words(
        "The engine works, but fails on this request. A repeat would fail too.",
        "Look for unusual values in the messages, the tools or `response_format`.",
    ),
    "request_timeout": Words("The body did not arrive in time.", "Send it again over a faster connection."),
    "request_too_large": Words(
        "The body exceeds the size limit of this address.",
        "Send less. For large files, use `/v1/uploads`, which takes them in parts.",
    ),
    "row_not_found": Words("The version has no row at this line.", "List the rows of the version."),
    "rows_in_use": Words("Another request is changing the same rows and did not end in time.", _REPEAT),
    "run_not_found": Words(f"The eval has no run with this id. {_NOT_YOURS}", _FIND),
    "server_error": Words(
        "There is a bug, or a service that Anneal needs does not work. The message reveals no internals.",
        "Try again later. When you contact support, give the `x-request-id` of the answer.",
    ),
    "service_unavailable": Words("A part of the platform cannot answer now.", _REPEAT),
    "signed_out": Words(
        "A page called after you were signed out.", "Sign in in another tab, return to the page and try again."
    ),
    "spend_cap_too_low": Words(
        "The spend cap does not cover one start of the job.", "Raise it to the amount that the message names."
    ),
    "stale_lease": Words(
        "A worker's lease ended, or another worker has it. Only workers receive this code.",
        "Nothing: the worker drops the run.",
    ),
    "still_counting": Words("A large file is still being counted or compared.", _REPEAT),
    "too_long_to_keep": Words("The conversation or its settings are too large to keep.", "Start a new conversation."),
    "too_many_invitations": Words(
        "The organization or the address reached its limit of invitations for now.",
        "Invite again tomorrow, or withdraw an open invitation. The message names the limit.",
    ),
    "unknown_parameter": Words("The API has no such field.", "Remove it, or check its spelling: `param` names it."),
    "unknown_url": Words(
        "No call has this address.",
        "Check the base URL: it ends in `/v1`, once. The API reference lists all addresses.",
    ),
    "unsupported_architecture": Words("Quotes do not support the base model's family.", "Choose another base model."),
    "unsupported_media_type": Words(
        "This address does not accept the `Content-Type` of the body.", "Send the type that the message names."
    ),
    "unsupported_parameter": Words(
        "OpenAI has this field, but ignoring it would change the answer.",
        "Remove it. The page on [inference](gateway.md#parameters) lists what each route accepts.",
    ),
    "upload_closed": Words(
        "The upload was completed or cancelled, or it has expired.", "Create another upload and send the parts again."
    ),
    "upload_incomplete": Words(
        "A worker reported files that storage does not have. Only workers receive this code.",
        "Nothing: the worker uploads them again.",
    ),
    "upload_not_found": Words(f"No upload has this id. {_NOT_YOURS}", _FIND),
    "version_not_loaded": Words(
        "No replica has loaded the version yet, so an alias may not move to it.",
        "The refusal made a replica load it, unless it is a whole model, which has its own replica. Try again in a "
        "minute, or call `GET /api/v1/models/{model}/serving`.",
    ),
    "wrong_address": Words("The invitation is for another email address.", "Sign in with that address to accept it."),
    "wrong_content": Words(
        "The bytes that arrived are not those that were announced. Nothing was kept.", "Send the file again."
    ),
}
