"""The Job page in a browser: the problem, its cause, the remedy, and live updates."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from paceline_server.api.examples import EXAMPLES
from paceline_server.api.schemas import WhatIf
from paceline_server.store import models
from paceline_server.store.tokens import create_token
from paceline_wire.topology import Topology
from tests.web.conftest import Site, Story, opened

pytestmark = pytest.mark.browser


def pixel(page: Page, x: float, y: float) -> list[int]:
    """Return the color of the heatmap at a point, given as shares of its size."""
    return page.locator(".heatmap canvas").evaluate(
        """(canvas, [x, y]) => {
            const copy = new OffscreenCanvas(canvas.width, canvas.height)
                .getContext('2d', {willReadFrequently: true});
            copy.drawImage(canvas, 0, 0);
            return [...copy.getImageData(canvas.width * x, canvas.height * y, 1, 1).data];
        }""",
        [x, y],
    )


def live(page: Page) -> None:
    """Wait until the page is connected and complete, so that its layout no longer moves."""
    expect(page.locator("article.job")).to_have_attribute("data-connection", "live")
    expect(page.locator("article.job")).to_have_attribute("aria-busy", "false")


@pytest.fixture(scope="module")
def shown(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The complete page of an unchanged story, for the tests that only read it."""
    site = Site(f"sqlite:///{tmp_path_factory.mktemp('shown') / 'paceline.db'}")
    story = Story(site)
    story.begin()
    with opened(browser, site) as visit:
        page = visit(story.url).page
        live(page)
        yield page
    site.stop()


def test_banner_shows_the_verdict(shown: Page) -> None:
    banner = shown.locator(".verdict")
    expect(banner.get_by_role("heading")).to_have_text(
        "Rank 2 (node-1) is 2.5x slower: thermal throttle of gpu 0."
    )
    expect(banner).to_have_class(re.compile("tone-warn"))
    expect(shown).to_have_title(re.compile("Rank 2 .*Paceline"))
    expect(banner).to_contain_text("gpt <b>stdlib</b>")


def test_figures_of_the_job_are_shown(shown: Page) -> None:
    stats = shown.locator(".stats")
    for figure in (
        "running",
        "60.0",
        "620",
        "119",
        "2.413",
        "dp2 \N{MULTIPLICATION SIGN} pp2",
        "approve",
    ):
        expect(stats).to_contain_text(figure)


def test_number_of_exited_ranks_is_shown_with_the_state(site: Any, story: Any, visit: Any) -> None:
    story.begin()
    with site.change() as session:
        for rank in (2, 3):
            session.get_one(models.RankRow, (story.job_id, rank)).state = "exited"
    expect(visit(story.url).page.locator(".stats")).to_contain_text("2 ranks exited")


def test_slow_rank_stands_out_on_the_heatmap(shown: Page) -> None:
    # Rank 2 is dp 1, stage 0, tp 0: second row, first of four columns.
    red, _, blue, _ = pixel(shown, 0.02, 0.55)
    calm_red, _, calm_blue, _ = pixel(shown, 0.02, 0.05)
    assert red - blue > 80
    assert abs(calm_red - calm_blue) < 30


def test_tooltip_of_a_cell_names_rank_and_operation(shown: Page) -> None:
    box = shown.locator(".heatmap canvas").bounding_box()
    shown.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + box["height"] * 0.75)
    tooltip = shown.locator(".tooltip")
    for text in (
        "Rank 2",
        "node-1",
        "dp 1 · stage 0 · tp 0",
        "2.5\N{MULTIPLICATION SIGN}",
        "forward 3 for 250",
    ):
        expect(tooltip).to_contain_text(text)
    expect(tooltip).to_be_in_viewport(ratio=0.99)  # not clipped


def test_heatmap_is_usable_by_keyboard_and_screen_reader(
    story: Any, visit: Callable[..., Any]
) -> None:
    story.begin()
    page = visit(story.url).page
    live(page)
    page.locator(".heatmap canvas").focus()
    page.keyboard.press("ArrowRight")  # starts at the slowest rank
    expect(page.get_by_role("status")).to_contain_text("Rank 2, 2.5")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("status")).to_contain_text("Rank 3, 1.01")
    page.get_by_text("Ranks as a table").click()
    expect(page.locator(".heatmap tbody tr")).to_have_count(8)
    heights = page.locator(".heatmap td").evaluate_all("cells => cells.map(c => c.offsetHeight)")
    assert max(heights) < 40, "a row takes two lines"


def test_incident_shows_evidence_and_counter_evidence(shown: Page) -> None:
    incident = shown.locator(".incident")
    expect(incident).to_have_count(1)
    expect(incident).to_contain_text("straggler · thermal throttle")
    expect(incident).to_contain_text("52% of step time")
    expect(incident).to_contain_text("SM clock fell at step 100")
    expect(incident).to_contain_text("795\u202fMHz vs 1,980\u202fMHz")
    expect(incident).to_contain_text("Evidence against this")
    expect(incident).to_contain_text("Host CPU pressure did not change")


def test_throttling_node_is_marked(shown: Page) -> None:
    node = shown.locator("[data-node=node-1]")
    for text in ("ready", "2, 3", "795", "91", "sw thermal slowdown"):
        expect(node).to_contain_text(text)


def test_approved_action_and_its_repair_are_shown_without_a_reload(
    story: Any, visit: Callable[..., Any]
) -> None:
    story.begin()
    page = visit(story.url).page
    live(page)
    page.evaluate("window.sameDocument = true")
    action = page.locator(f"[data-action={story.action_id}]")
    action.get_by_role("button", name="Approve restart").click()
    expect(action).to_contain_text("approved")
    assert story.action_state() == "approved"
    expect(action.get_by_role("button")).to_have_count(0)

    story.repair()
    expect(page.locator(".verdict")).to_have_class(re.compile("tone-good"))
    expect(page.locator(".incident .badge").first).to_contain_text("resolved")
    expect(page.locator(".incident > summary")).to_contain_text("restart done, 0 steps lost")
    page.locator(".incident > summary").click()
    expect(action).to_contain_text("resumed at step 120")
    expect(action.locator(".phases li")).to_have_count(3)
    assert page.evaluate("window.sameDocument") is True


def test_action_can_be_rejected(story: Any, visit: Callable[..., Any]) -> None:
    story.begin()
    page = visit(story.url).page
    live(page)
    action = page.locator(f"[data-action={story.action_id}]")
    action.get_by_role("button", name="Reject").click()
    expect(action).to_contain_text("rejected")
    assert story.action_state() == "rejected"


def test_a_restart_that_waits_for_a_checkpoint_can_be_rejected(
    story: Any, visit: Callable[..., Any]
) -> None:
    story.begin()
    story.wait_for_checkpoint()
    page = visit(story.url).page
    live(page)
    action = page.locator(f"[data-action={story.action_id}]")
    expect(action.locator(".phases")).to_contain_text("script's own next checkpoint")
    expect(page.locator("dl").first).to_contain_text("step 80")
    expect(action.get_by_role("button")).to_have_count(1)
    action.get_by_role("button", name="Reject restart").click()
    expect(action).to_contain_text("rejected")
    assert story.action_state() == "rejected"


def test_rejected_decision_shows_the_reason(story: Any, visit: Callable[..., Any]) -> None:
    story.begin()
    watch = visit(story.url)
    action = watch.page.locator(f"[data-action={story.action_id}]")
    button = action.get_by_role("button", name="Approve restart")
    expect(button).to_be_enabled()
    story.supersede_quietly()
    button.click()
    expect(action.get_by_role("alert")).to_contain_text("only a proposed action can be")
    watch.refused.remove(409)


def test_a_restart_can_be_requested_without_a_node(story: Any, visit: Callable[..., Any]) -> None:
    story.begin()
    page = visit(story.url).page
    live(page)
    page.get_by_role("button", name="Restart…").click()
    dialog = page.get_by_role("dialog", name="Restart gpt <b>stdlib</b>")
    expect(dialog.get_by_role("checkbox", name="Save a checkpoint first")).to_be_checked()
    expect(dialog.get_by_role("group").get_by_role("checkbox")).to_have_count(4)
    dialog.get_by_role("checkbox", name="node-1").check()
    dialog.get_by_label("Comment").fill("its NIC flaps")
    dialog.get_by_role("button", name="Restart job").click()
    expect(dialog).to_have_count(0)
    action = page.locator(".others .action").filter(has_text="requested by")
    expect(action.locator("p")).to_have_text(
        re.compile(r"Checkpoint and restart without node-1: requested by .*: its NIC flaps\.")
    )
    expect(action).to_be_visible()
    expect(page.get_by_role("button", name="Restart…")).to_have_count(0)
    with story.site.database.read() as session:
        rows = session.query(models.ActionRow).filter_by(state="approved").all()
        assert [row.view.exclude_nodes for row in rows] == [["node-1"]]


def test_a_refused_restart_shows_the_reason(story: Any, visit: Callable[..., Any]) -> None:
    story.begin()
    watch = visit(story.url)
    page = watch.page
    live(page)
    page.get_by_role("button", name="Restart…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("checkbox", name="Save a checkpoint first").uncheck()
    expect(dialog).to_contain_text("The ranks are stopped at once.")
    story.approve_another_quietly()
    dialog.get_by_role("button", name="Restart job").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Another action is approved: act-cccc3333")
    watch.refused.remove(409)
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)
    page.get_by_role("button", name="Restart…").click()
    expect(dialog.get_by_role("alert")).to_have_count(0)
    expect(dialog.get_by_role("checkbox", name="Save a checkpoint first")).to_be_checked()


def test_proposal_has_no_buttons_outside_mode_approve(
    story: Any, visit: Callable[..., Any]
) -> None:
    story.begin(mode="observe")
    action = visit(story.url).page.locator(f"[data-action={story.action_id}]")
    expect(action).to_contain_text("the job's mode is observe")
    expect(action.get_by_role("button")).to_have_count(0)


def test_new_step_appears_without_a_reload(story: Any, visit: Callable[..., Any]) -> None:
    story.begin()
    page = visit(story.url).page
    live(page)
    expect(page.locator("#steps header")).to_contain_text("120 steps")
    story.finish_step()
    expect(page.locator("#steps header")).to_contain_text("121 steps")
    expect(page.locator(".readout").first).to_contain_text("step 120")
    # The grid is fetched again and not streamed.
    expect(page.locator("#ranks header")).to_contain_text("116\N{EN DASH}120")


def test_failed_fetch_of_the_grid_is_retried(story: Any, visit: Callable[..., Any]) -> None:
    story.begin()
    page = visit(story.url).page
    ranks = page.locator("#ranks header")
    expect(ranks).to_contain_text("115\N{EN DASH}119")
    page.route("**/grid*", lambda route: route.abort(), times=1)
    story.finish_step()
    expect(ranks).to_contain_text("116\N{EN DASH}120")


def test_lost_connection_is_shown_and_no_event_is_missed(
    site: Any, story: Any, visit: Callable[..., Any]
) -> None:
    story.begin()
    watch = visit(story.url)
    live(watch.page)
    site.stop()
    banner = watch.page.locator(".banner")
    expect(banner).to_contain_text("Connection lost")
    expect(banner).to_contain_text(re.compile(r"from \d\d:\d\d:\d\d"))
    story.finish_step()
    site.start()
    expect(banner).to_have_count(0)
    expect(watch.page.locator("#steps header")).to_contain_text("121 steps")


def test_decision_can_be_repeated_once_the_server_is_back(
    site: Any, story: Any, visit: Callable[..., Any]
) -> None:
    story.begin()
    page = visit(story.url).page
    live(page)
    site.stop()
    action = page.locator(f"[data-action={story.action_id}]")
    action.get_by_role("button", name="Approve restart").click()
    expect(action.get_by_role("alert")).to_contain_text("is not responding")
    site.start()
    live(page)
    expect(action.get_by_role("alert")).to_have_count(0)
    expect(action.get_by_role("button", name="Approve restart")).to_be_enabled()


def test_a_hidden_tab_holds_no_connection(site: Any, story: Any, visit: Callable[..., Any]) -> None:
    story.begin()
    page = visit(story.url).page
    live(page)
    assert site.signals.changes.subscribers == 1
    show = """hidden => {
        Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    page.evaluate(show, True)
    # The server notices the disconnect at its next write, so the test causes one.
    deadline = time.monotonic() + 60
    while site.signals.changes.subscribers > 0:
        assert time.monotonic() < deadline
        story.finish_step()
        page.wait_for_timeout(50)
    page.evaluate(show, False)
    live(page)
    expect(page.locator("#steps header")).to_contain_text(f"{story.step + 1} steps")


def test_server_with_tokens_requires_one(site: Any, story: Any, visit: Callable[..., Any]) -> None:
    story.begin()
    with site.database.write() as session:
        secret = create_token(session, "eve", "viewer", 1)
    watch = visit(story.url, signed_in=False)
    page = watch.page
    expect(page.locator("form")).to_contain_text("paceline server token create")
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("form")).to_contain_text("was rejected")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(6000)
    # The note on read-only access is refreshed every 30 s, with access or without.
    again = [url for url in asked if not url.endswith("/api/v1/caller")]
    assert again == [], "a page without access must not ask again by itself"
    page.get_by_label("Token").fill(secret)
    page.get_by_role("button", name="Continue").click()
    live(page)
    page.reload()
    live(page)
    page.get_by_role("button", name="Approve restart").click()
    expect(page.get_by_role("alert")).to_contain_text("scope operator")
    assert story.action_state() == "proposed"
    assert set(watch.refused) == {401, 403}
    watch.refused.clear()


def test_signed_out_page_reads_and_a_login_link_lets_it_decide(
    site: Any, story: Any, visit: Callable[..., Any]
) -> None:
    story.begin()
    watch = visit(story.url, signed_in=False)
    page = watch.page
    live(page)
    expect(page.get_by_text("Read only")).to_contain_text(f"paceline login --server {site.url}")
    page.get_by_role("button", name="Approve restart").click()
    expect(page.get_by_role("alert")).to_contain_text("the link that `paceline login` prints")
    assert (story.action_state(), watch.refused) == ("proposed", [401])
    watch.refused.clear()
    page.goto(site.url + site.login_path())
    expect(page).to_have_url(f"{site.url}/")
    page.goto(story.url)
    live(page)
    expect(page.get_by_text("Read only")).to_have_count(0)
    page.get_by_role("button", name="Approve restart").click()
    expect(page.locator(f"[data-action={story.action_id}]")).to_contain_text("approved")
    assert story.action_state() == "approved"


def test_unknown_job_shows_not_found(story: Any, visit: Callable[..., Any]) -> None:
    watch = visit(f"{story.site.url}/jobs/job-00000000")
    expect(watch.page.get_by_role("heading", name="Job not found")).to_be_visible()
    assert set(watch.refused) == {404}
    watch.refused.clear()


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 390),
        ("dark", 1280),
        pytest.param("dark", 390, marks=pytest.mark.campaign),
        pytest.param("light", 1024, marks=pytest.mark.campaign),
        pytest.param("dark", 1024, marks=pytest.mark.campaign),
        pytest.param("light", 1280, marks=pytest.mark.campaign),
    ],
)
def test_page_has_no_clipped_content(
    story: Any, visit: Callable[..., Any], scheme: str, width: int
) -> None:
    story.begin()
    story.site.app.state.parts.what_ifs.get = lambda *_: WhatIf(**EXAMPLES["WhatIf"])
    page = visit(story.url, color_scheme=scheme, viewport={"width": width, "height": 800}).page
    live(page)
    expect(page.locator("#what-if tbody tr").first).to_be_visible()
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]
    panels = page.locator(".panel, .stats, .verdict").all()
    assert len(panels) >= 7
    for panel in panels:
        inner, outer = panel.evaluate("panel => [panel.scrollWidth, panel.clientWidth]")
        assert inner <= outer, panel.get_attribute("id")
    for table in page.locator("#what-if .scroll").all():
        inner, outer = table.evaluate("table => [table.scrollWidth, table.clientWidth]")
        assert inner <= outer


def test_a_map_that_fits_has_no_scrollbar(story: Any, visit: Callable[..., Any]) -> None:
    story.begin()
    page = visit(story.url).page
    expect(page.locator(".heatmap-frame canvas")).to_be_visible()
    for width in range(1280, 1290):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(
            """() => {
                const frame = document.querySelector('.heatmap-frame');
                return frame.scrollWidth <= frame.clientWidth
                    && frame.clientWidth - frame.querySelector('canvas').clientWidth < 16;
            }"""
        )


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param(Topology(16, 8, 8), id="1,024 ranks"),
        pytest.param(Topology(80, 16, 8), id="10,240 ranks", marks=pytest.mark.campaign),
    ],
)
def test_heatmap_of_many_ranks_is_drawn(
    story: Any, visit: Callable[..., Any], topology: Topology
) -> None:
    story.topology = topology
    story.slow_rank = topology.rank(topology.dp // 2, 0, 0)
    story.slow_from = 0
    story.begin(steps=3)
    page = visit(story.url, viewport={"width": 1440, "height": 900}).page
    live(page)
    expect(page.locator(".heatmap")).to_contain_text(f"Slowest: rank {story.slow_rank}")
    red, _, blue, _ = pixel(page, 0.002, 0.5 + 0.5 / topology.dp)
    assert red - blue > 80
    page.get_by_text("Ranks as a table").click()
    expect(page.locator(".heatmap tbody tr")).to_have_count(100)
    expect(page.locator(".heatmap tbody tr").first).to_contain_text(str(story.slow_rank))


def test_what_if_shows_gains_and_memory_cost(story: Any, visit: Callable[..., Any]) -> None:
    """The page shows the API's own example."""
    story.begin()
    story.site.app.state.parts.what_ifs.get = lambda *_: WhatIf(**EXAMPLES["WhatIf"])
    page = visit(story.url).page
    panel = page.locator("#what-if")
    expect(panel.locator("header")).to_contain_text("replay of steps 19\N{EN DASH}26")
    expect(panel).to_contain_text("rank 2 (dp rank 1, stage 0) explains 97% of the slowdown")
    row = panel.locator(".gains tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("rank 2")
    expect(row).to_contain_text("2.21\N{MULTIPLICATION SIGN}")
    advised = panel.locator(".advised tbody tr")
    expect(advised).to_contain_text("zero-bubble")
    expect(advised).to_contain_text("1.05\N{MULTIPLICATION SIGN}")
    expect(advised).to_contain_text("13% → 8%")
    panel.get_by_text("All slowdowns").click()
    expect(panel.locator(".slowdowns")).to_contain_text("all backward passes")


def test_missing_replay_shows_what_to_do(shown: Page) -> None:
    panel = shown.locator("#what-if")
    expect(panel).to_contain_text("PACELINE_SERVER_LOG_RETENTION_SECONDS")


def test_open_incident_comes_first_and_its_action_is_usable_by_keyboard(
    story: Any, visit: Callable[..., Any]
) -> None:
    story.begin()
    story.add_resolved_incidents(200)
    page = visit(story.url).page
    live(page)
    incidents = page.locator(".incident")
    expect(page.locator("#incidents header")).to_contain_text("1 open of 201")
    expect(incidents).to_have_count(11)
    expect(incidents.first).to_have_attribute("id", story.incident_id)
    page.get_by_role("link", name="Review 1 action").focus()
    page.keyboard.press("Enter")
    button = page.get_by_role("button", name="Reject restart")
    for _ in range(20):
        page.keyboard.press("Tab")
        if button.evaluate("button => button === document.activeElement"):
            break
    page.keyboard.press("Enter")
    expect(page.locator(f"[data-action={story.action_id}]")).to_contain_text("rejected")
    assert story.action_state() == "rejected"
    page.get_by_role("button", name="Show all 201 incidents").click()
    expect(incidents).to_have_count(201)


def test_slow_rank_is_visible_on_detection_without_a_pipeline(
    story: Any, visit: Callable[..., Any]
) -> None:
    """Three slow steps are enough for the detection."""
    story.topology = Topology(8, 1, 1)
    story.slow_from = 117
    story.begin()
    page = visit(story.url).page
    live(page)
    expect(page.locator("#heatmap-cell")).to_contain_text("Slowest: rank 2, 2.5")
    expect(page.locator("#ranks .axis")).to_have_text("columns: 8 dp replicas")
    expect(page.locator("#ledger")).to_be_visible()
    expect(page.locator("#bubble")).to_have_count(0)


def test_long_names_are_wrapped(site: Any, story: Any, visit: Callable[..., Any]) -> None:
    story.node = lambda rank: f"rack-{rank // 2}" + ".a-very-long-domain" * 8
    story.begin(name="a_name_without_a_space" * 10)
    for url, width, part in ((story.url, 390, ".incident"), (site.url, 1280, "tbody tr")):
        page = visit(url, viewport={"width": width, "height": 800}).page
        expect(page.locator(part)).to_be_visible()
        overflow = page.locator(f".panel:has({part})").evaluate(
            "panel => Math.max(...[panel, ...panel.querySelectorAll('.scroll')]"
            ".map(each => each.scrollWidth - each.clientWidth))"
        )
        assert overflow <= 0
