"""One session of the official SDK with fine-tuning jobs, run by a process of its own for each version of the SDK.

Arguments: base URL, API key, id of a training file, folder of the SDK ("" for the installed one). Prints what it saw
as JSON.
"""

import json
import sys

base_url, key, file_id, folder = sys.argv[1:]
if folder:
    sys.path.insert(0, folder)

import openai  # noqa: E402 - from the folder above

client = openai.OpenAI(api_key=key, base_url=f"{base_url}/v1", max_retries=0)
jobs = client.fine_tuning.jobs
SUPERVISED = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}}
created = jobs.create(model="anneal-demo", training_file=file_id, suffix="triage", seed=7, method=SUPERVISED)
GRADER = {"type": "string_check", "name": "a", "input": "{{sample.output_text}}", "reference": "{{item.b}}"}
EQUAL = GRADER | {"operation": "eq"}
graders = client.fine_tuning.alpha.graders
permissions = client.fine_tuning.checkpoints.permissions
other = jobs.create(model="anneal-demo", training_file=file_id, metadata={"team": "support"})
seen = {
    "version": openai.__version__,
    "created": created.to_dict(),
    "retrieved": jobs.retrieve(created.id).to_dict(),
    "pages": [job.id for job in jobs.list(limit=1)],
    "by_label": [job.id for job in jobs.list(metadata={"team": "support"})],
    "events": [[event.object, event.message] for event in jobs.list_events(created.id, limit=1)],
    "checkpoints": jobs.checkpoints.list(created.id).to_dict()["data"],
    "cancelled": jobs.cancel(created.id).status,
    "grader": graders.validate(grader=EQUAL).grader.to_dict() == EQUAL,
    "reward": graders.run(grader=EQUAL, model_sample="red", item={"b": "red"}).to_dict(),
}
for name, act in {
    "pause": lambda: jobs.pause(other.id),
    "resume": lambda: jobs.resume(other.id),
    "cancel": lambda: jobs.cancel(created.id),
    "unknown": lambda: jobs.retrieve("ftjob-unknown"),
    "permissions": lambda: permissions.retrieve("ft:a:b:c:d:ckpt-step-1"),
    "elsewhere": lambda: client.get("/realtime/sessions", cast_to=object),
    "slash": lambda: client.models.retrieve("nobody/has-this"),
}.items():
    try:
        act()
    except openai.APIStatusError as error:
        seen[name] = [error.status_code, error.code, error.param]
        seen["help"] = error.body["doc_url"]
sys.stdout.write(json.dumps(seen))
