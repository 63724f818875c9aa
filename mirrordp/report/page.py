"""Reports as one HTML page: a `RunReport` or a `Comparison` in, the text of the page out.

The page is self-contained and readable on a phone and on paper. It loads nothing and runs no
scripts, and its content security policy makes the browser forbid both. It shows what the report
holds and what follows from it, and therefore nothing that the guarantee does not cover.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mirrordp._rounding import percent_upwards, upwards
from mirrordp._show import escaped
from mirrordp._versions import VERSION
from mirrordp.report import card
from mirrordp.report.charts import Series, bars, both_sizes, legend
from mirrordp.report.comparison import (
    BARS,
    Comparison,
    Outcome,
    higher_is_better,
    metrics,
    outcomes,
    spans_decades,
)
from mirrordp.report.evaluation import (
    DIAGONAL_LABEL,
    Coefficient,
    TestCurve,
    coefficients,
    results_on_test_rows,
)
from mirrordp.report.figures import Curve
from mirrordp.report.statement import RunReport

_LONGEST_LIST = 12

_STYLE = """
:root{color-scheme:light;--ink:#17212b;--soft:#52606d;--line:#d9dee3;--paper:#fff;--ground:#f4f6f8;
--accent:#0072B2;--stop:#8a1c12;--stop-ground:#fdf0ee;--note:#6b4a00;--note-ground:#fff7e3}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);overflow-wrap:anywhere;
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:54rem;margin:0 auto;padding:1.25rem}
header h1{margin:.3rem 0 .2rem;font-size:1.7rem;line-height:1.25}
.kind{margin:0;color:var(--soft);font-size:.85rem;letter-spacing:.06em;text-transform:uppercase}
section,header{background:var(--paper);border:1px solid var(--line);border-radius:10px;
padding:1.1rem 1.35rem;margin:0 0 1rem}
h2{margin:0 0 .6rem;font-size:1.15rem}
h3{margin:1.2rem 0 .4rem;font-size:1rem}
p{margin:.45rem 0}
.quiet,figcaption{color:var(--soft);font-size:.9rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.6rem 1.2rem;
margin:.9rem 0 .2rem}
.figures b{display:block;font-size:1.5rem;line-height:1.2;font-variant-numeric:tabular-nums}
.figures span{color:var(--soft);font-size:.85rem}
.pill{display:inline-block;margin:.7rem 0 0;padding:.15rem .7rem;border-radius:1rem;
background:var(--stop);color:#fff;font-weight:600;font-size:.9rem}
.warned{border-left:6px solid var(--note);background:var(--note-ground);border-radius:6px;
padding:.65rem .9rem;margin:.6rem 0}
.warned.grave{border-color:var(--stop);background:var(--stop-ground)}
.warned b{color:var(--note)}
.warned.grave b{color:var(--stop)}
.warned p{margin:.15rem 0 0}
table{border-collapse:collapse;width:100%;font-size:.93rem}
.scroll{overflow-x:auto}
th,td{text-align:left;vertical-align:top;padding:.42rem .8rem .42rem 0;
border-bottom:1px solid var(--line)}
tr:last-child>th,tr:last-child>td{border-bottom:0}
th{font-weight:600}
tbody th{font-weight:500;color:var(--soft);width:38%}
.data tbody th{color:var(--ink);width:auto}
.data th,.data td{overflow-wrap:break-word;max-width:18rem}
.data tr>:last-child{padding-right:0}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap;
max-width:none!important}
.scores td.number{white-space:normal}
.best td,.best th{font-weight:650}
figure{margin:.4rem 0 0}
figure svg{display:block;max-width:100%;height:auto;font:13px system-ui,sans-serif}
.narrow{display:none}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.4rem;margin:.3rem 0 .5rem;padding:0}
.legend li{display:flex;align-items:center;gap:.45rem;font-size:.93rem}
.legend svg{flex:none}
.odds{margin:1rem 0 .3rem}
.odds .bar{position:relative;height:14px;border-radius:7px;background:#e4e8ec;overflow:hidden}
.odds .bar i{position:absolute;inset:0 auto 0 0;background:var(--accent)}
.odds .ends{display:flex;justify-content:space-between;font-size:.85rem;color:var(--soft)}
ul.plain{margin:.3rem 0;padding-left:1.2rem}
ul.plain li{margin:.3rem 0}
details{margin-top:.7rem}
summary{cursor:pointer;color:var(--accent)}
footer{color:var(--soft);font-size:.85rem;margin:1.2rem 0 2rem}
@media(max-width:40rem){main{padding:.6rem}section,header{padding:.95rem 1rem;border-radius:8px}
td.number{white-space:normal}.data th,.data td{padding-right:.5rem}
.wide{display:none}.narrow{display:block}header h1{font-size:1.35rem}
.qa,.qa tbody,.qa tr,.qa th,.qa td{display:block;width:100%;border:0;padding:0}
.qa tr{border-bottom:1px solid var(--line);padding:.5rem 0}.qa tr:last-child{border:0}}
@media print{body{background:#fff;font-size:11pt}main{max-width:none;padding:0}
section,header{border:0;padding:.4rem 0;break-inside:avoid}details{display:none}}
"""


def report_page(report: RunReport, *, run: str) -> str:
    """Returns the page of one run.

    Args:
        report: the report to show.
        run: the run's name, for the footer.
    """
    return _page(
        report.title,
        [
            _header(report),
            _warnings(report),
            _promise(report),
            _spending(report),
            _course(report),
            _on_test_rows(report) or _outcomes(report, run),
            _coefficients(report),
            _configuration(report),
        ],
        f"Made from report.json of {run}",
    )


def comparison_page(comparison: Comparison) -> str:
    """Returns the page of several runs."""
    runs = list(dict.fromkeys(row.run for row in comparison.rows))
    title = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} compared"
    head = (
        f'<header><p class="kind">Privacy and utility</p><h1>{escaped(title)}</h1>'
        f'<p class="quiet">{escaped(", ".join(runs))}</p></header>'
    )
    notes = "".join(f"<li>{escaped(note)}</li>" for note in comparison.notes())
    header, rows, common = _without_common(comparison)
    same = f" The same for all: {', '.join(common)}." if common else ""
    table = _section(
        "The runs",
        _data_table(header, rows, {"epsilon", "delta", "steps", comparison.metric})
        + f'<p class="quiet">{escaped("Epsilon: smaller protects more." + same)}</p>',
    )
    beware = _section("What to know when comparing", f'<ul class="plain">{notes}</ul>')
    return _page(title, [head, _trade_off(comparison), table, beware, _each(comparison)], "Made")


def _without_common(comparison: Comparison) -> tuple[list[str], list[list[str]], list[str]]:
    """Returns the table without columns that are the same in each row, and what these say."""
    header = comparison.header()
    rows = [comparison.cells(row) for row in comparison.rows]
    keep = {"run", "method", "epsilon", comparison.metric}
    common = {
        index: f"{name} {rows[0][index]}"
        for index, name in enumerate(header)
        if len(rows) > 1 and name not in keep and len({row[index] for row in rows}) == 1
    }

    def rest(cells: list[str]) -> list[str]:
        return [cell for index, cell in enumerate(cells) if index not in common]

    return rest(header), [rest(row) for row in rows], list(common.values())


def _page(title: str, parts: Sequence[str], origin: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        # The page needs nothing from elsewhere and no scripts, so this forbids what may slip in.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        # Without an icon of its own a browser asks the server for one.
        '<link rel="icon" href="data:,">\n'
        f"<title>{escaped(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<footer>{escaped(origin)} by mirrordp {escaped(VERSION)}. This page "
        "holds no scripts and loads nothing.</footer>\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escaped(title)}</h2>{content}</section>"


def _header(report: RunReport) -> str:
    n = "public" if report.num_examples_is_public else "secret"
    figures = [
        (upwards(report.epsilon), "epsilon, smaller is stronger"),
        (upwards(report.delta, 6), "delta"),
        (f"one {report.unit}", "is protected (unit)"),
        (report.adjacency.value, f"adjacency; the number of records is {n}"),
    ]
    shown = "".join(
        f"<div><b>{escaped(value)}</b><span>{escaped(name)}</span></div>" for value, name in figures
    )
    pill = "" if report.is_for_release else '<p class="pill">Not for release</p>'
    return (
        f'<header><p class="kind">Privacy report</p><h1>{escaped(report.title)}</h1>'
        f'<div class="figures">{shown}</div>{pill}</header>'
    )


def _warnings(report: RunReport) -> str:
    found = report.warnings()
    if not found:
        return _section(
            "Before you rely on this", "<p>Nothing stands out. The limits are stated below.</p>"
        )
    lines = []
    for caution in found:
        kind, prefix = (" grave", "Do not release. ") if caution.grave else ("", "")
        lines.append(
            f'<div class="warned{kind}" role="note"><b>{prefix}{escaped(caution.title)}</b>'
            f"<p>{escaped(_sentence(caution.text))}</p></div>"
        )
    return _section("Before you rely on this", "".join(lines))


def _promise(report: RunReport) -> str:
    odds = ""
    if math.isfinite(report.epsilon):
        share = report.certainty
        width = max(0.0, min(100.0, 200 * (share - 0.5)))
        right = f"right at most {percent_upwards(share)} of the time"
        guess = f"Best possible guess about one {report.unit}"
        odds = (
            f'<div class="odds" role="img" aria-label="{guess}: {right}, where 50% is a coin toss">'
            f"<p>{guess}: <b>{right}</b></p>"
            f'<div class="bar"><i style="width:{width:.1f}%"></i></div>'
            '<div class="ends"><span>50%: a coin toss</span><span>100%: certainty</span></div>'
            "</div>"
        )
    answers = "".join(
        f"<tr><th scope='row'>{escaped(question)}</th><td>{escaped(_sentence(answer))}</td></tr>"
        for question, answer in card.answers(report)
    )
    limits = "".join(f"<li>{escaped(limit)}</li>" for limit in card.limits(report))
    return (
        _section("What is promised", f"<p>{escaped(report.statement())}</p>{odds}")
        + "\n"
        + _section("Questions and answers", f'<table class="qa"><tbody>{answers}</tbody></table>')
        + "\n"
        + _section("What is not protected", f'<ul class="plain">{limits}</ul>')
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _spending(report: RunReport) -> str:
    title = "The budget spent over time"
    if report.charged_steps == 0:
        return _section(title, "<p>No step read private records, so nothing was spent.</p>")
    spent = list(report.epsilon_over_steps)
    if not spent:
        return _section(title, "<p>The report does not hold this information.</p>")
    if len(spent) < 2 or not all(math.isfinite(epsilon) for _, epsilon in spent):
        return _section(
            title,
            f"<p>{report.charged_steps} step(s) read private records and cost epsilon "
            f"{upwards(spent[-1][1])}.</p>",
        )
    series = Series(
        "epsilon",
        [0, *(steps for steps, _ in spent)],
        [0.0, *(epsilon for _, epsilon in spent)],
        look=2,
        solid=True,
    )
    drawn = both_sizes(
        [series],
        describe=f"Epsilon grows to {upwards(spent[-1][1])} over {spent[-1][0]} steps",
        x_label="steps that read private records",
        y_label=f"epsilon at delta {upwards(report.delta, 6)}",
        from_zero=True,
    )
    rows = [[f"{steps:,}", upwards(epsilon)] for steps, epsilon in spent]
    half = next(s for s, e in spent if e >= spent[-1][1] / 2)
    return _section(
        title,
        f"<figure>{drawn}<figcaption>For this run alone. It is computed from sampling and noise, "
        f"without looking at any record. Half of epsilon was spent after about {half:,} of "
        f"{spent[-1][0]:,} steps.</figcaption></figure>"
        + _details("As a table", _data_table(["steps", "epsilon"], rows, {"steps", "epsilon"})),
    )


def _course(report: RunReport) -> str:
    parts = []
    for quantity in dict.fromkeys(curve.quantity for curve in report.curves):
        curves = [curve for curve in report.curves if curve.quantity == quantity]
        series = [_series(curve, look) for look, curve in enumerate(curves)]
        trials = max(len(curve.values) for curve in curves)
        drawn = both_sizes(
            series,
            describe=f"{quantity} over training steps for "
            + ", ".join(f"{c.label} (ends at {c.mean[-1]:.4g})" for c in curves),
            x_label="training step",
            y_label=f"{quantity} (lower is better)",
        )
        band = (
            f"Mean of {trials} trials; bands are two standard errors to either side."
            if trials > 1
            else "One trial."
        )
        rows = [
            [curve.label, f"{int(step):,}", f"{mean:.4g}", f"{error:.2g}" if trials > 1 else "–"]
            for curve in curves
            for step, mean, error in zip(curve.steps, curve.mean, curve.standard_error, strict=True)
        ]
        header = ["method", "step", quantity, "standard error"]
        parts.append(
            f"<figure>{legend(series)}{drawn}<figcaption>{band}</figcaption></figure>"
            + _details("As a table", _data_table(header, rows, {"step", quantity, header[-1]}))
        )
    if not parts:
        return ""
    measured = report.results.get("measured")
    note = f'<p class="quiet">Measured: {escaped(str(measured))}.</p>' if measured else ""
    return _section("Learning curves", note + "".join(parts))


def _series(curve: Curve, look: int) -> Series:
    mean, error = curve.mean, curve.standard_error
    several = len(curve.values) > 1
    return Series(
        curve.label,
        curve.steps.tolist(),
        mean.tolist(),
        (mean - 2 * error).tolist() if several else None,
        (mean + 2 * error).tolist() if several else None,
        look=look,
    )


def _outcomes(report: RunReport, run: str) -> str:
    rows = outcomes(report, run)
    names = metrics(rows)
    if not names:
        return ""
    cells = [[row.label, *map(row.with_error, names)] for row in rows]
    table = _data_table(["method", *names], cells, set(names), best=_best(rows, names[0]))
    notes = [] if len(rows) == 1 else [f"Each of the {len(rows)} rows has the epsilon above."]
    if any(row.errors for row in rows):
        notes.append("± is one standard error.")
    setting = report.results.get("choice_of_setting")
    if setting:
        notes.append(f"The setting was {setting}.")
    return _section(
        "Results" if len(rows) == 1 else "Methods compared",
        table + f'<p class="quiet">{escaped(" ".join(notes))}</p>',
    )


def _on_test_rows(report: RunReport) -> str:
    tested = results_on_test_rows(report.results)
    if tested is None:
        return ""
    header = ["measure", *tested.models]
    rows = [
        # The line may end before the interval, and not within it.
        [
            name,
            *(
                str(scores.get(name, "–")).replace(" to ", "\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}")
                for scores in tested.models.values()
            ),
        ]
        for name in tested.measures
    ]
    return _section(
        f"On {tested.rows:,} test rows",
        f'<div class="scores">{_data_table(header, rows, set(tested.models))}</div>'
        + f'<p class="quiet">Intervals: {escaped(tested.interval)}. These rows need no protection, '
        "and the model did not see them.</p>" + "".join(map(_test_curve, tested.curves)),
    )


def _test_curve(tested: TestCurve) -> str:
    points = tested.points
    line = Series(DIAGONAL_LABEL, tested.diagonal, tested.diagonal, markers=False, look=0)
    curve = Series(
        "this model",
        [point.predicted for point in points],
        [point.observed for point in points],
        [point.low for point in points],
        [point.high for point in points],
        band=not tested.is_calibration,
        look=2,
        solid=True,
    )
    across, up = tested.labels
    drawn = both_sizes(
        [line, curve],
        describe=f"{up} against {across}, from {points[0].predicted:.3g}, {points[0].observed:.3g} "
        f"to {points[-1].predicted:.3g}, {points[-1].observed:.3g}",
        x_label=across,
        y_label=up,
    )
    numbers = [
        [f"{p.predicted:.4g}", f"{p.observed:.4g}", f"{p.low:.4g}", f"{p.high:.4g}"] for p in points
    ]
    columns = ["predicted", "observed", "low", "high"]
    return (
        f"<h3>{tested.title}</h3><figure>{legend([line, curve])}{drawn}"
        f"<figcaption>{escaped(tested.caption)}</figcaption></figure>"
        + _details("As a table", _data_table(columns, numbers, set(columns)))
    )


def _coefficients(report: RunReport) -> str:
    found = coefficients(report.results)
    if not found:
        return ""
    return _section(
        "Largest coefficients",
        "".join(_coefficients_of(target, largest) for target, largest in found.items())
        + '<p class="quiet">'
        "Bars are two standard deviations to either side, by the noise alone: how far another fit "
        "of the same records would differ. They follow from the mechanism and public rows, and do "
        "not include that the records are a sample. Numbers are in units of their public standard "
        "deviation; a category is relative to the mean of its column, and a class to the mean of "
        "all classes.</p>",
    )


def _coefficients_of(target: str, largest: Sequence[Coefficient]) -> str:
    """Returns the figure and the table of one target; "" is the only one."""
    lines = [(one.name, one.value, *one.ends) for one in largest]
    first = largest[0]
    describe = f"The {len(largest)} largest coefficients, from {first.name}: {first.value:.3g}"
    wide, narrow = (
        bars(lines, describe=describe, x_label="coefficient", width=width) for width in (760, 350)
    )
    rows = [
        [
            one.name,
            f"{one.value:.4g}",
            "–" if one.noise_stddev is None else f"{one.noise_stddev:.2g}",
        ]
        for one in largest
    ]
    header = ["feature", "coefficient", "noise"]
    return (
        (f"<h3>{escaped(target)}</h3>" if target else "")
        + f'<figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div></figure>'
        + _details("As a table", _data_table(header, rows, set(header[1:])))
    )


def _best(rows: Sequence[Outcome], metric: str | None) -> int | None:
    """Returns the row with the best value, or None if there is nothing to compare."""
    if metric is None or len(rows) < 2:
        return None
    sign = -1 if higher_is_better(metric) else 1
    values = [sign * row.values[metric] for row in rows]
    return values.index(min(values)) if all(map(math.isfinite, values)) else None


def _configuration(report: RunReport) -> str:
    numbers = [[name, value] for name, value in card.numbers(report)]
    shown = {"methods", "measured", "choice_of_setting"}
    rest = {name: value for name, value in report.results.items() if name not in shown}
    if results_on_test_rows(rest) is not None:
        # The table of models shows the same numbers.
        rest = {
            name: value
            for name, value in rest.items()
            if name.partition("_")[0] not in ("test", "public", "baseline")
        }
    if coefficients(rest):
        del rest["coefficients"]
    parts = [_pairs(numbers)]
    if pairs := list(_flat(rest)):
        parts.append("<h3>Stated by the person who ran this</h3>" + _pairs(pairs))
    versions = [[name, version] for name, version in report.versions.items()]
    parts.append(_details("Versions", _pairs(versions)))
    return _section("Configuration", "".join(parts))


def _flat(content: Mapping[str, Any], path: str = "") -> Iterator[list[str]]:
    """Yields nested results as pairs of a path and a short text."""
    for key, value in content.items():
        name = f"{path}{key.replace('_', ' ')}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}: ")
        else:
            yield [name, _short(value)]


def _short(value: Any) -> str:
    if isinstance(value, list):
        more = f", and {len(value) - _LONGEST_LIST} more" if len(value) > _LONGEST_LIST else ""
        return ", ".join(map(_short, value[:_LONGEST_LIST])) + more
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "–" if value is None else str(value)


def _trade_off(comparison: Comparison) -> str:
    groups, metric = comparison.groups(), comparison.metric
    if metric is None or not groups:
        return ""
    series = []
    for look, (label, rows) in enumerate(groups.items()):
        values = [row.values[metric] for row in rows]
        errors = [row.errors.get(metric, 0.0) for row in rows]
        series.append(
            Series(
                label,
                [row.report.epsilon for row in rows],
                values,
                [v - e for v, e in zip(values, errors, strict=True)],
                [v + e for v, e in zip(values, errors, strict=True)],
                band=False,
                look=look,
                names=comparison.names(rows),
            )
        )
    better = "higher" if higher_is_better(metric) else "lower"
    drawn = both_sizes(
        series,
        describe=f"{metric} against epsilon, for {', '.join(groups)}",
        x_label="epsilon (smaller protects more)",
        y_label=f"{metric} ({better} is better)",
        log_x=spans_decades(comparison),
    )
    caption = [BARS] if comparison.has_errors else []
    left_out = len(comparison.rows) - sum(map(len, groups.values()))
    if left_out:
        caption.append(f"Not drawn: {left_out} row(s) whose epsilon is zero or infinite.")
    return _section(
        "Privacy and utility",
        f"<figure>{legend(series)}{drawn}<figcaption>{' '.join(caption)}</figcaption></figure>",
    )


def _each(comparison: Comparison) -> str:
    """Returns what each run promises, in words."""
    reports = {row.run: row.report for row in comparison.rows}
    parts = []
    for run, report in reports.items():
        warned = "".join(
            f'<div class="warned{" grave" if caution.grave else ""}" role="note">'
            f"<b>{'Do not release. ' if caution.grave else ''}{escaped(caution.title)}</b></div>"
            for caution in report.warnings()
        )
        parts.append(
            f"<h3>{escaped(run)}: {escaped(report.title)}</h3><p>{escaped(report.statement())}</p>"
            f'<p class="quiet">Covers: {escaped(report.scope)}. Settings: '
            f"{escaped(report.tuning)}.</p>{warned}"
        )
    return _section("What each run promises", "".join(parts))


def _data_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: set[Any],
    best: int | None = None,
) -> str:
    kinds = [' class="number"' if name in numeric else "" for name in header]
    head = "".join(
        f'<th scope="col"{kind}>{escaped(name.replace("_", " "))}</th>'
        for name, kind in zip(header, kinds, strict=True)
    )
    body = []
    for number, row in enumerate(rows):
        mark = ' class="best"' if number == best else ""
        suffix = " (best)" if number == best else ""
        first = f'<th scope="row"{kinds[0]}>{escaped(row[0])}{suffix}</th>'
        others = "".join(
            f"<td{kind}>{escaped(cell)}</td>" for cell, kind in zip(row[1:], kinds[1:], strict=True)
        )
        body.append(f"<tr{mark}>{first}{others}</tr>")
    return (
        f'<div class="scroll" tabindex="0"><table class="data"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _pairs(rows: Sequence[Sequence[str]]) -> str:
    lines = "".join(
        f'<tr><th scope="row">{escaped(name)}</th><td>{escaped(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table><tbody>{lines}</tbody></table>"


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escaped(summary)}</summary>{content}</details>"
