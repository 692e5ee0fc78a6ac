//! Lines as SVG. Colours come from the page's style sheet, by class.

use super::{at, html::escape};
use crate::report::{At, Chart, Section};
use crate::units::figure;
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// Sizes in the drawing's own units; on a phone they are about its pixels.
const WIDTH: f64 = 400.0;
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 52.0;
/// Half of a label stands to the right of the last point.
const RIGHT: f64 = 24.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 40.0;
/// Lines with a colour of their own.
pub const COLOURS: usize = 8;
/// Labels under the axis at most.
const LABELS_MAX: usize = 7;

/// What the upright axis goes from and to.
#[derive(Debug, Clone, Copy)]
struct Scale {
    low: f64,
    high: f64,
    logarithmic: bool,
}

impl Scale {
    fn of(values: &[f64], logarithmic: bool) -> Scale {
        let high = values.iter().copied().fold(0.0, f64::max);
        let low = values.iter().copied().filter(|v| *v > 0.0).fold(high, f64::min);
        if logarithmic && low > 0.0 {
            // Whole powers of ten, and at least one of them.
            let (low, high) = (low.log10().floor(), high.log10().ceil());
            Scale { low, high: high.max(low + 1.0), logarithmic: true }
        } else {
            Scale { low: 0.0, high: nice_end(high), logarithmic: false }
        }
    }

    fn y(self, value: f64) -> f64 {
        let value = if self.logarithmic { value.max(f64::MIN_POSITIVE).log10() } else { value };
        let share = ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        TOP + (1.0 - share) * (HEIGHT - TOP - BOTTOM)
    }

    fn ticks(self) -> Vec<f64> {
        if self.logarithmic {
            let (low, high) = (self.low as i32, self.high as i32);
            (low..=high).map(|power| 10_f64.powi(power)).collect()
        } else {
            (0..=4).map(|step| self.high * f64::from(step) / 4.0).collect()
        }
    }
}

/// The next number above that is 1, 2, 4, 5 or 8 times a power of ten.
fn nice_end(value: f64) -> f64 {
    if value <= 0.0 || !value.is_finite() {
        return 1.0;
    }
    let power = 10_f64.powf(value.log10().floor());
    let step = [1.0, 2.0, 4.0, 5.0, 8.0].into_iter().find(|step| step * power >= value);
    step.unwrap_or(10.0) * power
}

/// A tick's value in few characters: `1M`, `10k`, `0.1`.
fn short(value: f64) -> String {
    for (size, unit) in [(1e9, "G"), (1e6, "M"), (1e3, "k")] {
        if value >= size {
            let shown = figure(value / size);
            let trimmed = if shown.contains('.') {
                shown.trim_end_matches('0').trim_end_matches('.')
            } else {
                shown.as_str()
            };
            return format!("{trimmed}{unit}");
        }
    }
    format!("{value}")
}

/// Draws a chart of a section; nothing where there is less than two values to go over.
pub fn lines(section: &Section, chart: &Chart) -> String {
    let values: BTreeSet<&At> = section.rows.iter().filter_map(|row| row.at.get(chart.x)).collect();
    let values: Vec<&At> = values.into_iter().collect();
    if values.len() < 2 {
        return String::new();
    }
    let x_of =
        |index: usize| LEFT + (WIDTH - LEFT - RIGHT) * index as f64 / (values.len() - 1) as f64;
    let mut series: Vec<Option<&At>> = Vec::new();
    for row in &section.rows {
        let line = chart.lines.and_then(|index| row.at.get(index));
        if !series.contains(&line) {
            series.push(line);
        }
    }
    let ranges = section.rows.iter().filter_map(|row| row.range(&chart.metric));
    let ends: Vec<f64> = ranges.flat_map(|(low, high)| [low, high]).collect();
    let scale = Scale::of(&ends, chart.logarithmic);
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">",
        escape(&chart.title)
    );
    axes(&mut svg, section, chart, scale, &values, &x_of);
    for (number, line) in series.iter().enumerate() {
        let mut path = String::new();
        let mut points = String::new();
        for (index, value) in values.iter().enumerate() {
            let row = section.rows.iter().find(|row| {
                row.at.get(chart.x) == Some(*value)
                    && chart.lines.and_then(|of| row.at.get(of)) == *line
            });
            let Some(row) = row else { continue };
            let Some(median) = row.median(&chart.metric) else { continue };
            let (x, y) = (x_of(index), scale.y(median));
            let _ = write!(path, "{}{x:.1} {y:.1}", if path.is_empty() { 'M' } else { 'L' });
            let what: Vec<String> = row
                .at
                .iter()
                .enumerate()
                .map(|(of, value)| at(section.dimensions.get(of), value))
                .collect();
            let _ = write!(
                points,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"><title>{}: {}</title></circle>",
                escape(&what.join(", ")),
                figure(median)
            );
            if let Some((low, high)) = row.range(&chart.metric)
                && high > low
            {
                let (from, to) = (scale.y(low), scale.y(high));
                let _ = write!(points, "<path d=\"M{x:.1} {from:.1}V{to:.1}\"/>");
            }
        }
        let colour = number % COLOURS;
        let _ = write!(svg, "<g class=\"l{colour}\"><path d=\"{path}\"/>{points}</g>");
    }
    svg.push_str("</svg>");
    let mut out = format!("<figure><figcaption>{}</figcaption>{svg}", escape(&chart.title));
    if let Some(of) = chart.lines {
        legend(&mut out, section, of, &series);
    }
    out.push_str("</figure>");
    out
}

fn axes(
    svg: &mut String,
    section: &Section,
    chart: &Chart,
    scale: Scale,
    values: &[&At],
    x_of: &dyn Fn(usize) -> f64,
) {
    for tick in scale.ticks() {
        let y = scale.y(tick);
        let _ = write!(
            svg,
            "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{}\"/>\
             <text class=\"y\" x=\"{}\" y=\"{:.1}\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            y + 4.0,
            short(tick)
        );
    }
    let every = values.len().div_ceil(LABELS_MAX);
    for (index, value) in values.iter().enumerate().step_by(every) {
        let shown = match value {
            At::Number(number) if *number >= 1_000 && is_count(section, chart) => {
                short(*number as f64)
            }
            other => at(section.dimensions.get(chart.x), other),
        };
        let _ = write!(
            svg,
            "<text class=\"x\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            x_of(index),
            HEIGHT - BOTTOM + 16.0,
            escape(&shown)
        );
    }
    let name = section.dimensions.get(chart.x).map(|d| d.name.as_str()).unwrap_or_default();
    let _ = write!(
        svg,
        "<text class=\"x soft\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 6.0,
        escape(name)
    );
}

fn is_count(section: &Section, chart: &Chart) -> bool {
    use crate::report::DimensionKind;
    section.dimensions.get(chart.x).is_some_and(|d| d.kind == DimensionKind::Count)
}

fn legend(out: &mut String, section: &Section, of: usize, series: &[Option<&At>]) {
    let name = section.dimensions.get(of).map(|d| d.name.as_str()).unwrap_or_default();
    let _ = write!(out, "<p class=\"legend\"><span class=\"soft\">{}</span>", escape(name));
    for (number, line) in series.iter().enumerate() {
        let Some(line) = line else { continue };
        let _ = write!(
            out,
            "<span><i class=\"l{}\"></i>{}</span>",
            number % COLOURS,
            escape(&at(section.dimensions.get(of), line))
        );
    }
    out.push_str("</p>");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers() {
        for (value, end) in [(0.0, 1.0), (0.9, 1.0), (1.1, 2.0), (37.0, 40.0), (810.0, 1_000.0)] {
            assert!((nice_end(value) - end).abs() < 1e-9, "{value}");
        }
        let scale = Scale::of(&[3.0, 700.0], true);
        assert_eq!(scale.ticks(), [1.0, 10.0, 100.0, 1_000.0]);
        assert!(scale.y(3.0) > scale.y(700.0));
        let same = Scale::of(&[10.0, 10.0], true);
        assert!(same.y(10.0).is_finite());
        assert!(Scale::of(&[], true).y(1.0).is_finite());
        for (value, text) in [(1e6, "1M"), (2_500.0, "2.5k"), (10_000.0, "10k"), (0.1, "0.1")] {
            assert_eq!(short(value), text);
        }
    }
}
