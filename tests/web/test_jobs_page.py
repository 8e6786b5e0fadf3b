"""The list of jobs, and navigation to and from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def test_empty_list_shows_how_to_start_a_job(site: Any, visit: Callable[..., Any]) -> None:
    page = visit(site.url).page
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    expect(page.locator("main")).to_contain_text("paceline run")
    expect(page.locator("main")).to_contain_text("make demo")
    page.set_viewport_size({"width": 390, "height": 800})
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]
    for inner, outer in page.locator("pre").evaluate_all(
        "commands => commands.map(command => [command.scrollWidth, command.clientWidth])"
    ):
        assert inner <= outer  # no command is clipped


def test_first_job_appears_without_a_reload(
    site: Any, story: Any, visit: Callable[..., Any]
) -> None:
    page = visit(site.url).page
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    story.begin()
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody tr")).to_contain_text("1 action to approve")
    story.add_resolved_incidents(2)
    expect(page.get_by_role("columnheader", name="Open incidents")).to_be_visible()
    expect(page.locator("tbody td[data-name='Open incidents']")).to_have_text("1")


def test_link_opens_a_job_and_back_returns(
    site: Any, story: Any, visit: Callable[..., Any]
) -> None:
    story.begin()
    page = visit(site.url).page
    page.get_by_role("link", name="gpt <b>stdlib</b>").click()
    expect(page).to_have_url(story.url)
    expect(page.locator(".verdict")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()


def test_unknown_address_links_to_the_list(site: Any, visit: Callable[..., Any]) -> None:
    page = visit(f"{site.url}/nowhere").page
    page.get_by_role("link", name="All jobs").click()
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()


def test_page_loads_only_its_own_files(site: Any, visit: Callable[..., Any]) -> None:
    page = visit(site.url).page
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    loaded = page.evaluate("performance.getEntriesByType('resource').map(each => each.name)")
    assert loaded
    assert all(name.startswith(site.url) for name in loaded)


def test_slow_server_is_asked_for_the_list_once_at_a_time(
    story: Any, visit: Callable[..., Any]
) -> None:
    story.begin()
    page = visit(story.site.url).page
    expect(page.locator("tbody tr")).to_have_count(1)
    asked: list[Any] = []
    page.route("**/api/v1/jobs", lambda route: asked.append(route))
    page.wait_for_timeout(10_000)  # three intervals
    assert len(asked) == 1
    asked[0].continue_()


def test_list_stays_while_the_server_is_unavailable(story: Any, visit: Callable[..., Any]) -> None:
    story.begin()
    watch = visit(story.site.url)
    rows = watch.page.locator("tbody tr")
    expect(rows).to_have_count(1)
    problem = '{"title": "Service Unavailable", "status": 503}'
    watch.page.route("**/api/v1/jobs", lambda route: route.fulfill(status=503, body=problem))
    expect(watch.page.locator(".banner")).to_contain_text("may be out of date")
    expect(rows).to_have_count(1)
    watch.page.unroute("**/api/v1/jobs")
    expect(watch.page.locator(".banner")).to_have_count(0)
    assert set(watch.refused) == {503}
    watch.refused.clear()
