"""The API call behind each form: the same request in curl and Python, with the exact values of the page."""

import json
from collections.abc import Mapping, Sequence

from django.conf import settings

from apps.contracts.hyperparameters import Objective

_KEY = "$ANNEAL_API_KEY"
_JOBS = "/v1/fine_tuning/jobs"
_ADAPTER = ("lora_rank", "lora_alpha", "use_dora", "use_rslora")


def sample(key: str, label: str, code: str) -> dict[str, str]:
    return {"key": key, "label": label, "code": code}


def job_samples(
    *,
    model: str,
    training_file: str,
    validation_file: str = "",
    suffix: str = "",
    method: str,
    objective: Objective = Objective.SUPERVISED,
    recipe: Mapping[str, object],
    grader: Mapping[str, object] | None = None,
    exports: Sequence[str] = (),
    metadata: Mapping[str, str] | None = None,
    integrations: Sequence[Mapping[str, object]] = (),
    pool: str = "",
    gpu_count: int = 1,
    node_count: int = 1,
    cap_usd: str = "",
) -> list[dict[str, str]]:
    """Return POST /v1/fine_tuning/jobs. `recipe` holds the values that differ from the model's own choice."""
    standard: dict[str, object] = {"model": model, "training_file": training_file}
    if validation_file:
        standard["validation_file"] = validation_file
    if suffix:
        standard["suffix"] = suffix
    if objective is Objective.ORPO:  # the rows determine the other objectives
        standard["method"] = {"type": objective.value}
    if metadata:
        standard["metadata"] = dict(metadata)
    if integrations:
        standard["integrations"] = list(integrations)
    after = {"evaluation": {"grader": dict(grader)} if grader else None, "exports": list(exports)}
    counts = {"gpu_count": gpu_count if pool else 1, "node_count": node_count}
    compute = ({"pool": pool} if pool else {}) | {name: count for name, count in counts.items() if count > 1}
    ours = _our_fields(method, recipe, compute, cap_usd) | {name: value for name, value in after.items() if value}
    return [
        sample("curl", "curl", curl(_JOBS, standard | ours)),
        sample("python", "Python", _python("job = client.fine_tuning.jobs.create", standard, ours) + "print(job.id)\n"),
    ]


def _our_fields(
    method: str, recipe: Mapping[str, object], compute: Mapping[str, object], cap_usd: str
) -> dict[str, object]:
    adapter = {name.removeprefix("lora_"): recipe[name] for name in _ADAPTER if name in recipe}
    whole = {"method": method} if method == "full" else {}
    rest = whole | {name: value for name, value in recipe.items() if name not in _ADAPTER}
    fields: dict[str, object] = {
        "quantization": "nf4" if method == "qlora" else None,
        "lora": adapter,
        "recipe": rest,
        "compute": compute,
        "budget": {"max_cost_usd": cap_usd} if cap_usd else None,
    }
    return {name: value for name, value in fields.items() if value}


def chat_samples(*, model: str, prompt: str = "Hello") -> list[dict[str, str]]:
    """Return POST /v1/chat/completions for a model."""
    return request_samples({"model": model, "messages": [{"role": "user", "content": prompt}]})


def request_samples(body: Mapping[str, object]) -> list[dict[str, str]]:
    """Return POST /v1/chat/completions with this body."""
    python = _python("reply = client.chat.completions.create", body, {}) + "print(reply.choices[0].message.content)\n"
    return [
        sample("curl", "curl", curl("/v1/chat/completions", body)),
        sample("python", "Python", python),
        sample("javascript", "JavaScript", _javascript(body)),
    ]


def batch_samples(*, model: str) -> list[dict[str, str]]:
    """Return the code of a whole batch with one request to a model: write the file, upload it, create the batch."""
    chat = "/v1/chat/completions"
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    request = {"custom_id": "request-1", "method": "POST", "url": chat, "body": body}
    written = json.dumps(request, ensure_ascii=False).replace("'", "'\\''")
    shell = (
        f"echo '{written}' > requests.jsonl\n"
        f'curl {settings.PUBLIC_URL}/v1/files \\\n  -H "Authorization: Bearer {_KEY}" \\\n'
        "  -F purpose=batch -F file=@requests.jsonl\n\n# with the id that the upload returned\n"
    )
    batch = {"input_file_id": "file-…", "endpoint": chat, "completion_window": "24h"}
    python = (
        "import json\nimport os\n\nfrom openai import OpenAI\n\n"
        f'client = OpenAI(base_url="{settings.PUBLIC_URL}/v1", api_key=os.environ["ANNEAL_API_KEY"])\n'
        f"request = {_literal(request, '')}\n"
        'file = client.files.create(file=("requests.jsonl", json.dumps(request).encode()), purpose="batch")\n'
        f'batch = client.batches.create(\n    input_file_id=file.id, endpoint="{chat}", completion_window="24h"\n)\n'
        "print(batch.id, batch.status)\n"
    )
    return [sample("curl", "curl", shell + curl("/v1/batches", batch)), sample("python", "Python", python)]


def first_job_samples(*, model: str, sample_url: str) -> list[dict[str, str]]:
    """Return the code of a whole first job.

    It gets the sample, uploads it, trains with a cap of one dollar, waits, and asks the new model.
    """
    quoted = json.dumps(model)
    python = (
        "import os\nimport time\nimport urllib.request\n\nfrom openai import OpenAI\n\n"
        f'urllib.request.urlretrieve("{sample_url}", "sample.jsonl")\n'
        f'client = OpenAI(base_url="{settings.PUBLIC_URL}/v1", api_key=os.environ["ANNEAL_API_KEY"])\n'
        'file = client.files.create(file=open("sample.jsonl", "rb"), purpose="fine-tune")\n'
        "job = client.fine_tuning.jobs.create(\n"
        f"    model={quoted},\n    training_file=file.id,\n"
        '    extra_body={"budget": {"max_cost_usd": "1"}},\n)\n'
        'while job.status not in ("succeeded", "failed", "cancelled", "paused"):\n'
        "    time.sleep(3)\n    job = client.fine_tuning.jobs.retrieve(job.id)\n    print(job.status)\n"
        "reply = client.with_options(max_retries=20).chat.completions.create(\n"
        '    model=job.fine_tuned_model,\n    messages=[{"role": "user", "content": "Where is my card?"}],\n)\n'
        "print(reply.choices[0].message.content)\n"
    )
    javascript = (
        'import fs from "node:fs";\nimport OpenAI from "openai";\n\n'
        f'fs.writeFileSync("sample.jsonl", await (await fetch("{sample_url}")).text());\n'
        f'const client = new OpenAI({{ baseURL: "{settings.PUBLIC_URL}/v1", apiKey: process.env.ANNEAL_API_KEY }});\n'
        'const file = await client.files.create({ file: fs.createReadStream("sample.jsonl"), purpose: "fine-tune" });\n'
        f"let job = await client.fineTuning.jobs.create({{\n  model: {quoted},\n  training_file: file.id,\n"
        '  budget: { max_cost_usd: "1" },\n});\n'
        'while (!["succeeded", "failed", "cancelled", "paused"].includes(job.status)) {\n'
        "  await new Promise((done) => setTimeout(done, 3000));\n"
        "  job = await client.fineTuning.jobs.retrieve(job.id);\n  console.log(job.status);\n}\n"
        "const reply = await client.chat.completions.create(\n"
        '  { model: job.fine_tuned_model, messages: [{ role: "user", content: "Where is my card?" }] },\n'
        "  { maxRetries: 20 },\n);\nconsole.log(reply.choices[0].message.content);\n"
    )
    key = f'-H "Authorization: Bearer {_KEY}"'
    upload = (
        f"curl -o sample.jsonl {sample_url}\n"
        f"curl {settings.PUBLIC_URL}/v1/files {key} \\\n  -F purpose=fine-tune -F file=@sample.jsonl\n"
    )
    body = {"model": model, "training_file": "file-…", "budget": {"max_cost_usd": "1"}}
    return [
        sample("curl", "curl", f"{upload}\n# with the id that the upload returned\n" + curl(_JOBS, body)),
        sample("python", "Python", python),
        sample("javascript", "JavaScript", javascript),
    ]


def curl(path: str, body: Mapping[str, object]) -> str:
    written = json.dumps(body, indent=2, ensure_ascii=False).replace("'", "'\\''")
    return (
        f'curl {settings.PUBLIC_URL}{path} \\\n  -H "Authorization: Bearer {_KEY}" \\\n'
        f"  -H \"Content-Type: application/json\" \\\n  -d '{written}'\n"
    )


def _python(call: str, arguments: Mapping[str, object], extra_body: Mapping[str, object]) -> str:
    lines = [f"    {name}={_literal(value)}," for name, value in arguments.items()]
    if extra_body:
        lines.append(f"    extra_body={_literal(extra_body)},")
    return (
        "import os\n\nfrom openai import OpenAI\n\n"
        f'client = OpenAI(base_url="{settings.PUBLIC_URL}/v1", api_key=os.environ["ANNEAL_API_KEY"])\n'
        f"{call}(\n" + "\n".join(lines) + "\n)\n"
    )


def _javascript(body: Mapping[str, object]) -> str:
    return (
        'import OpenAI from "openai";\n\n'
        f'const client = new OpenAI({{ baseURL: "{settings.PUBLIC_URL}/v1", apiKey: process.env.ANNEAL_API_KEY }});\n'
        f"const reply = await client.chat.completions.create({json.dumps(body, indent=2, ensure_ascii=False)});\n"
        "console.log(reply.choices[0].message.content);\n"
    )


def _literal(value: object, indent: str = "    ") -> str:
    """Return a value as Python source. JSON of strings and numbers is valid Python too."""
    inner = indent + "    "
    if isinstance(value, dict) and value:
        lines = [f"{inner}{json.dumps(name)}: {_literal(item, inner)}," for name, item in value.items()]
        return "\n".join(["{", *lines, indent + "}"])
    if isinstance(value, list) and value:
        return "\n".join(["[", *(f"{inner}{_literal(item, inner)}," for item in value), indent + "]"])
    if value is None or isinstance(value, bool):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
