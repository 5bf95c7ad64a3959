"""The compute step: the table of options, its deadline, the ways to make a job fit, and the parts htmx asks for."""

import datetime
import html
import re
from decimal import Decimal

import pytest

from apps.billing.books.adjustments import request_adjustment
from apps.billing.queries import get_balance
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.core.money import usd_to_nano
from apps.datasets.models import TokenCount
from apps.finetuning.models import FineTuningJob, GpuPool, Worker
from apps.finetuning.usage import quotas
from tests.factories.market import Market

LIVE = {"HX-Request": "true", "HX-Target": "div#compute-live"}
PARTS = ("price-live", "price-lines", "price-act", "cap-help", "dock-text", "dock-act", "recipe-strip", "compute-more")


@pytest.fixture
def market(organization) -> Market:
    return Market(organization)


@pytest.fixture
def compute(market, client_for, bob):
    """Return the step's page as text, asked for with changes to the address; `headers` make it a part."""
    client = client_for(bob)

    def get(*, status: int = 200, headers: dict[str, str] | None = None, **changes: str) -> str:
        query = "".join(f"&{name}={value}" for name, value in changes.items())
        answer = client.get(f"{market.wizard}&step=compute{query}", headers=headers)
        assert answer.status_code == status
        return html.unescape(answer.content.decode())

    return get


def rows(page: str) -> dict[str, str]:
    """Return the table's rows by the key of their option."""
    found = re.findall(r"<tr class=\"[^\"]*\" data-pick.*?</tr>", page, re.DOTALL)
    return {re.search(r'value="([^"]+)"', row)[1]: row for row in found}


def due(hours: float) -> str:
    return f"{db_now() + datetime.timedelta(hours=hours):%Y-%m-%dT%H:%MZ}"


def badged(page: str, badge: str) -> list[str]:
    return [key for key, row in rows(page).items() if f">{badge}</span>" in row or f"{badge}</span>" in row]


# --- the table ------------------------------------------------------------------------------------------------------


def test_every_pool_has_a_row_with_memory_speed_finish_and_cost(compute) -> None:
    found = rows(compute())

    assert {"h100", "b200", "h200", "a100", "l40s", "l4"} <= set(found)
    for key in ("h100", "b200", "a100"):
        assert re.search(r"\d+%.*GiB free", found[key], re.DOTALL)
        assert "% used" in found[key]
        assert re.search(r"\$[\d.]+–\$[\d.]+", found[key])
        assert "<time" in found[key]


def test_a_machine_with_too_little_memory_is_named_though_its_gpu_is_large_enough(compute) -> None:
    Worker.objects.filter(hostname="h100").update(memory_bytes=2 * 2**30)

    page = compute()

    refused = rows(page)["h100"]
    assert re.search(r"Needs \d\.\d GiB of the host's memory; a worker here has 2\.0 GiB\.", refused)
    assert "disabled" in refused and "Needs" not in refused.split('class="c-mem"')[1]
    assert re.search(r"a pool whose machines have \d\.\d GiB of memory\.", page)


def test_each_badge_is_given_once_and_the_recommended_row_is_chosen_and_first(compute) -> None:
    page = compute()

    assert [len(badged(page, badge)) for badge in ("Recommended", "Cheapest", "Fastest")] == [1, 1, 1]
    first = next(iter(rows(page)))
    assert badged(page, "Recommended") == badged(page, "Cheapest") == [first]
    assert re.search(r"<input[^>]* checked", rows(page)[first])


@pytest.mark.slow
def test_a_deadline_moves_the_recommendation_to_what_meets_it_at_p90(compute) -> None:
    GpuPool.objects.exclude(name__in=("h100", "l40s")).update(is_open=False)
    set_price(
        sku="training:l40s", unit="gpu_ms", price_nano=10**8, per=3_600_000, by="system", now=db_now()
    )  # ten cents an hour, on a card that takes three times as long
    free = compute()
    p50, p90 = _spans(free, "h100")

    in_time = compute(needed_by=due((p90 + 120) / 3600))
    at_median = compute(needed_by=due((p50 + 120) / 3600))

    assert badged(free, "Recommended") == badged(in_time, "Cheapest") == ["l40s"]
    assert badged(in_time, "Recommended") == ["h100"]
    assert "In time:" in rows(in_time)["h100"]
    assert "Late:" in rows(in_time)["l40s"]
    assert badged(at_median, "Recommended") == []  # one case in two would be late
    assert "May be late:" in rows(at_median)["h100"]


@pytest.mark.slow
def test_what_cannot_start_now_is_a_group_of_its_own_and_sorted_and_late_like_the_rest(compute) -> None:
    Worker.objects.filter(hostname__in=("b200", "l4")).update(last_seen_at=db_now() - datetime.timedelta(hours=1))
    page = compute()
    spans = {key: _spans(page, key)[0] for key in ("b200", "h100", "a100")}

    by_finish = list(rows(compute(sort="finish")))
    by_cost = list(rows(compute(sort="cost")))
    late = compute(needed_by=due((spans["b200"] - 60) / 3600))

    assert page.index("Available now") < page.index('id="g-h100"') < page.index("Not available now")
    assert page.index("Not available now") < page.index('id="g-b200"')
    assert spans["b200"] < spans["h100"] < spans["a100"]
    assert by_finish.index("h100") < by_finish.index("a100") < by_finish.index("b200")
    assert by_cost != by_finish
    assert "Late:" in rows(late)["b200"] and "when a worker comes online" in rows(late)["b200"]
    badges = [key for badge in ("Recommended", "Cheapest", "Fastest") for key in badged(page, badge)]
    assert badges and not {"b200", "l4"} & set(badges)


@pytest.mark.slow
def test_several_gpus_are_shown_unasked_where_they_alone_meet_the_deadline(compute) -> None:
    GpuPool.objects.exclude(name="h200").update(is_open=False)
    many = compute(several="1", epochs="5")
    alone, eight = (_spans(many, key)[1] for key in ("h200(?!:)", "h200:8"))

    page = compute(epochs="5", needed_by=due((eight + 120) / 3600))

    assert alone > eight + 300
    assert ":" in badged(page, "Recommended")[0]


@pytest.mark.slow
def test_when_nothing_is_in_time_it_says_so_and_recommends_nothing(compute) -> None:
    page = compute(needed_by=due(0.05))

    assert badged(page, "Recommended") == []
    assert "No pool has a 90% chance of finishing by then. The fastest is marked." in page
    assert "Late:" in rows(page)["a100"]
    GpuPool.objects.exclude(name="a100").update(is_open=False)
    alone = compute(needed_by=due(0.05))
    assert "chance of finishing by then." in alone and "The fastest is marked." not in alone


@pytest.mark.slow
def test_a_balance_below_the_hold_is_said_beside_the_price(compute, organization) -> None:
    def leave(usd: Decimal) -> None:
        more_nano = usd_to_nano(usd) - get_balance(organization=organization).available_nano
        request_adjustment(organization=organization, amount_nano=more_nano, reason="x", by="user_olga", now=db_now())

    hold = Decimal(re.search(r'data-out="cap">\$([\d.]+)<', compute())[1])
    leave(hold - Decimal("0.01"))
    short, part, capped = compute(), compute(headers=LIVE), compute(cap=str(hold - 1))
    leave(hold + Decimal("0.01"))

    said = f"and the hold is ${hold}. To launch it,"
    assert said in short and said in part
    assert "and the hold is" not in capped + compute()


@pytest.mark.slow
def test_of_a_number_of_hours_and_a_date_the_earlier_deadline_counts(compute) -> None:
    late = "No pool has a 90% chance of finishing by then."

    assert late in compute(within="72", needed_by=due(0.05))
    assert late not in compute(within="72") and late not in compute(within="72", needed_by=due(100))
    late_ones = [
        {key for key, row in rows(page).items() if "Late:" in row}
        for page in (compute(within="1", needed_by=due(100)), compute(within="1"), compute(needed_by=due(100)))
    ]
    assert late_ones[0] == late_ones[1] != late_ones[2]


@pytest.mark.parametrize(
    ("deadline", "said"),
    [
        ({"needed_by": "tomorrow"}, "Enter a date and a time."),
        ({"needed_by": "2001-01-01T10:00Z"}, "passed"),
        ({"within": "3"}, "Choose 1, 2, 4, 8, 24 or 72 hours."),
    ],
)
def test_a_wrong_deadline_is_said_and_nothing_is_quoted(compute, deadline, said) -> None:
    page = compute(**deadline, status=422)

    assert "<h1>Choose compute</h1>" in page
    assert said in page
    assert rows(page) == {}
    buttons = re.findall(r"<button([^>]*)>(?:(?!</button>).)*Review run", page, re.DOTALL)
    assert len(buttons) == 2 and all(" disabled" in button for button in buttons)  # beside the price, and on a phone


def test_a_spot_pool_is_marked_and_is_later_by_the_work_it_redoes_not_dearer(compute) -> None:
    before = compute(pool="a100", epochs="5")
    GpuPool.objects.filter(name="a100").update(is_spot=True, interruptions_per_hour=3.0)
    after = compute(pool="a100", epochs="5")

    assert ">Spot</span>" not in rows(before)["a100"]
    assert ">Spot</span>" in rows(after)["a100"]
    assert re.search(r"<dt>Spot</dt><dd>about [\d.]+ interruptions?<span>, \d.* redone, not billed</span></dd>", after)
    cost = re.compile(r'data-cost="([^"]+)"')
    assert cost.search(rows(before)["a100"])[1] == cost.search(rows(after)["a100"])[1]
    assert _spans(after, "a100")[0] > _spans(before, "a100")[0]


@pytest.mark.slow
def test_several_gpus_are_offered_where_a_worker_has_them_and_quoted_with_the_reason_elsewhere(compute) -> None:
    few, many, chosen = compute(), compute(several="1"), compute(pool="h200:4")

    assert "h200:4" not in rows(few)
    assert "more with multiple GPUs" in few
    assert " disabled" not in rows(many)["h200:4"]  # its worker has eight
    assert "A worker of this pool has 1 GPU." in rows(many)["h100:2"]
    assert " disabled" in rows(many)["h100:2"]
    assert " checked" in rows(chosen)["h200:4"]
    assert "<dt>GPU</dt><dd>4 × " in chosen
    assert '"gpu_count": 4' in chosen  # of the call to copy


@pytest.mark.slow
def test_a_job_launched_on_several_gpus_takes_them(compute, market, client_for, bob) -> None:
    quotas.set_quota(organization=market.organization, by="system", now=db_now(), concurrent_gpus=8)
    client = client_for(bob)
    review = client.get(f"{market.wizard}&step=review&pool=h200:4")
    form = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', review.content.decode()))

    launched = client.post("/jobs/new", {name: html.unescape(value) for name, value in form.items()})

    job = FineTuningJob.objects.get()
    assert launched["Location"].endswith(job.pk)
    assert (job.pool.name, job.gpu_count, job.estimate["gpu_count"]) == ("h200", 4, 4)
    assert str(job.spend_cap_nano) == form["cap_nano"]
    assert "4 × " in client.get(launched["Location"]).content.decode()


def test_what_does_not_fit_lists_its_ways_each_with_a_price_and_a_link_that_applies_it(compute, market) -> None:
    page = compute()
    ways = re.search(r'id="g-l4".*?<tr class="ways">(.*?)</tr>', page, re.DOTALL)[1]
    links = re.findall(r'href="([^"]+)"', ways)

    assert "Needs " in rows(page)["l4"]
    assert ways.count("<li>") >= 2
    assert ways.count("$") >= 2
    qlora = next(link for link in links if "method=qlora" in link)
    assert "step=compute" in qlora
    assert "pool=" not in qlora


@pytest.mark.slow
def test_the_hosts_memory_is_offered_and_applied_in_one_click(compute, client_for, bob) -> None:
    page = compute()
    ways = re.search(r'id="g-l4".*?<tr class="ways">(.*?)</tr>', page, re.DOTALL)[1]
    [link] = [link for link in re.findall(r'href="([^"]+)"', ways) if "cpu_offload=True" in link]

    applied = client_for(bob).get(link).content.decode()

    assert "GiB free" in rows(applied)["l4"]
    assert 'name="cpu_offload" value="True"' in applied  # it goes on to the review


def test_applying_a_way_makes_the_job_fit(compute) -> None:
    page = compute(method="qlora")

    assert "GiB free" in rows(page)["l4"]
    assert " disabled" not in rows(page)["l4"]


def test_the_picture_has_the_same_values_as_a_table(compute) -> None:
    page = compute()
    picture = re.search(r'<svg class="plot plot-scatter".*?</svg>', page, re.DOTALL)[0]
    table = page.partition("View as table")[2]

    assert 'role="img"' in picture
    assert "Cheapest: " in re.search(r'aria-label="([^"]+)"', picture)[1]
    assert table.count('<th scope="row">') >= 5
    assert "unbeaten" in table


# --- the live form --------------------------------------------------------------------------------------------------


def test_a_change_is_answered_with_the_table_and_every_part_that_follows_from_it(compute) -> None:
    part = compute(headers=LIVE, lora_rank="64")

    assert "<html" not in part
    assert len(rows(part)) >= 6
    for name in PARTS:
        assert f'<hx-partial hx-target="#{name}"' in part
    assert "LoRA, rank 64" in part
    assert 'name="lora_rank"' not in part  # the fields stay as the reader left them


@pytest.mark.parametrize(
    "change",
    [{"lora_rank": "64"}, {"max_length": "1024"}, {"batch_size": "8"}, {"method": "qlora"}, {"epochs": "1"}],
    ids=lambda change: next(iter(change)),
)
def test_each_field_changes_the_estimate(compute, change) -> None:
    before, after = compute(headers=LIVE), compute(headers=LIVE, **change)

    assert rows(before)["h100"] != rows(after)["h100"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epochs": "900"}, "Epochs: epochs must be a whole number from 1 to 100."),
        ({"batch_size": "0"}, "Batch: batch_size must be a whole number from 1 to 1,024."),
        ({"max_length": "many"}, "Longest row: Enter a whole number."),
        ({"max_length": "99999999"}, "Longest row: max_length must be a whole number from 8 to 8,192."),
        ({"lora_rank": "12"}, "Rank: Select a valid choice."),
        ({"method": "magic"}, "Method: Select a valid choice."),
    ],
)
def test_a_bad_value_is_named_in_the_part_and_on_the_page_and_shows_no_price(compute, change, said) -> None:
    part = compute(headers=LIVE, status=422, **change)
    page = compute(status=422, **change)

    for shown in (part, page):
        assert said in re.sub(r"<[^>]+>", "", shown)
        assert rows(shown) == {}
        assert "Fix the highlighted fields" in shown
        assert re.search(r"\$\d", shown.partition('hx-target="#price-live"')[2].partition("</hx-partial>")[0]) is None


def test_without_script_a_button_updates_the_same_page(compute) -> None:
    page = compute(max_length="1024")

    assert re.search(r'<noscript><button[^>]* name="step" value="compute">Update</button></noscript>', page)
    assert 'value="1024"' in page


@pytest.mark.slow
def test_a_pool_chosen_by_hand_stays_and_one_chosen_for_the_reader_follows_the_recommendation(compute) -> None:
    recommended = badged(compute(), "Recommended")[0]
    other = "a100" if recommended != "a100" else "h100"

    def checked(page: str) -> str:
        return next(key for key, row in rows(page).items() if re.search(r"<input[^>]* checked", row))

    assert checked(compute(headers=LIVE, pool=other, auto=recommended)) == other
    assert checked(compute(headers=LIVE, pool=other, auto=other)) == recommended


def test_a_file_without_trained_tokens_is_refused_in_words(compute) -> None:
    TokenCount.objects.update(trained_tokens=0)

    assert "has no trained tokens" in compute(status=422)
    assert "has no trained tokens" in compute(status=422, headers=LIVE)


@pytest.mark.slow
def test_a_longest_row_that_cuts_off_every_answer_is_refused_at_its_field(market, compute) -> None:
    TokenCount.objects.update(starts=[[200, 240, 18_240]])

    for step in ("compute", "method"):
        page = compute(status=422, max_length="199", step=step)
        before, _, after = page.partition('id="id_max_length"')
        assert "Set max_length to 200 or more." in before.rpartition("<label")[2] + after[:1_000]
        assert "Fix the highlighted fields" in page
    assert "Set max_length to 200 or more." in compute(status=422, headers=LIVE, max_length="199")
    assert rows(compute(max_length="200"))


@pytest.mark.slow
def test_viewers_outsiders_and_nobody_get_no_part_of_it(market, client_for, alice, bob, vera, charlie, rival) -> None:
    def status(person) -> int:
        return client_for(person).get(f"{market.wizard}&step=compute", headers=LIVE).status_code

    assert [status(person) for person in (alice, bob)] == [200, 200]
    assert status(vera) == 403
    assert status(charlie) == 404
    nobody = client_for(None).get(f"{market.wizard}&step=compute", headers=LIVE)
    assert "sign" in nobody.headers["HX-Redirect"] or "login" in nobody.headers["HX-Redirect"]
    assert b"$" not in nobody.content


def _spans(page: str, key: str) -> list[float]:
    """Return the seconds to an option's end as the picture's table shows them: expected, and in nine cases of ten."""
    row = re.search(rf'<th scope="row">{key}\b.*?</tr>', page.partition("View as table")[2], re.DOTALL)[0]
    texts = re.findall(r'<td class="right">([^<]+)</td>', row)[:2]
    parts = [re.fullmatch(r"(?:(\d+)h )?(\d+) ?m(?:in)?", text).groups() for text in texts]
    return [int(hours or 0) * 3600 + int(minutes) * 60 for hours, minutes in parts]
