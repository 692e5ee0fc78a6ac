//! Bars as SVG. Colours come from the page's style sheet, by class.

use super::escape;
use std::fmt::Write as _;

/// A horizontal bar, stacked of parts.
#[derive(Debug)]
pub struct Bar {
    /// Shown to its left.
    pub label: String,
    /// From left to right.
    pub parts: Vec<Part>,
    /// Smallest and largest, drawn as a whisker.
    pub spread: Option<[f64; 2]>,
}

/// A stretch of a bar.
#[derive(Debug)]
pub struct Part {
    /// Shown when pointed at, and in the bar's caption if there are several.
    pub name: String,
    /// Class that gives the colour.
    pub class: &'static str,
    /// Length.
    pub value: f64,
}

/// Sizes in the drawing's own units.
const WIDTH: f64 = 720.0;
const LABEL_WIDTH: f64 = 200.0;
/// Room to the right of the longest bar for its figure.
const FIGURE_WIDTH: f64 = 90.0;
const BAR_HEIGHT: f64 = 22.0;
const ROW_HEIGHT: f64 = 34.0;
const CAPTION_HEIGHT: f64 = 24.0;

fn begin(height: f64, what: &str) -> String {
    format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\">", escape(what))
}

/// Bars on one linear scale from 0.
pub fn bars(bars: &[Bar], unit: &str) -> String {
    let total = |bar: &Bar| bar.parts.iter().map(|part| part.value).sum::<f64>();
    let reach = |bar: &Bar| bar.spread.map_or(0.0, |[_, high]| high).max(total(bar));
    let largest = bars.iter().map(reach).fold(f64::MIN_POSITIVE, f64::max);
    let scale = (WIDTH - LABEL_WIDTH - FIGURE_WIDTH) / largest;
    let stacked = bars.iter().any(|bar| bar.parts.len() > 1);
    let caption = if stacked { CAPTION_HEIGHT } else { 0.0 };
    let what: Vec<String> =
        bars.iter().map(|bar| format!("{} {:.2} {unit}", bar.label, total(bar))).collect();
    let mut svg = begin(ROW_HEIGHT * bars.len() as f64 + caption, &what.join(", "));
    for (row, bar) in bars.iter().enumerate() {
        let top = row as f64 * ROW_HEIGHT + (ROW_HEIGHT - BAR_HEIGHT) / 2.0;
        let middle = top + BAR_HEIGHT / 2.0;
        label(&mut svg, &bar.label, middle);
        let mut left = LABEL_WIDTH;
        for part in &bar.parts {
            let width = part.value * scale;
            let _ = write!(
                svg,
                "<rect class=\"{}\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" \
                 height=\"{BAR_HEIGHT}\"><title>{}: {:.2} {unit}</title></rect>",
                part.class,
                escape(&part.name),
                part.value
            );
            left += width;
        }
        let mut right = left;
        if let Some([low, high]) = bar.spread
            && high > low
        {
            let (from, to) = (LABEL_WIDTH + low * scale, LABEL_WIDTH + high * scale);
            right = right.max(to);
            let (up, down) = (middle - 6.0, middle + 6.0);
            let _ = write!(
                svg,
                "<path class=\"whisker\" d=\"M{from:.1} {up:.1}V{down:.1}M{from:.1} \
                 {middle:.1}H{to:.1}M{to:.1} {up:.1}V{down:.1}\"/>"
            );
        }
        figure(&mut svg, right, middle, &format!("{:.2} {unit}", total(bar)));
    }
    if stacked {
        legend(&mut svg, bars, ROW_HEIGHT * bars.len() as f64 + CAPTION_HEIGHT / 2.0);
    }
    svg.push_str("</svg>");
    svg
}

/// Ratios on a logarithmic scale, to both sides of 1.
pub fn ratios(ratios: &[(String, f64)]) -> String {
    let log = |ratio: f64| ratio.max(0.001).log2();
    let lowest = ratios.iter().map(|(_, ratio)| log(*ratio)).fold(-0.5, f64::min);
    let highest = ratios.iter().map(|(_, ratio)| log(*ratio)).fold(1.0, f64::max);
    // Figures of bars to the left stand to the right of the line, so no room is lost there.
    let scale = (WIDTH - LABEL_WIDTH - FIGURE_WIDTH) / (highest - lowest);
    let zero = LABEL_WIDTH - lowest * scale;
    let height = ROW_HEIGHT * ratios.len() as f64;
    let what: Vec<String> = ratios.iter().map(|(case, x)| format!("{case} {x:.2} ×")).collect();
    let mut svg = begin(height, &what.join(", "));
    for (row, (case, ratio)) in ratios.iter().enumerate() {
        let top = row as f64 * ROW_HEIGHT + (ROW_HEIGHT - BAR_HEIGHT) / 2.0;
        let middle = top + BAR_HEIGHT / 2.0;
        label(&mut svg, case, middle);
        let end = zero + log(*ratio) * scale;
        let class = if *ratio < 1.0 { "slower" } else { "farshore" };
        let _ = write!(
            svg,
            "<rect class=\"{class}\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" \
             height=\"{BAR_HEIGHT}\"/>",
            zero.min(end),
            (end - zero).abs()
        );
        figure(&mut svg, zero.max(end), middle, &format!("{ratio:.2} ×"));
    }
    let _ = write!(svg, "<path class=\"line\" d=\"M{zero:.1} 0V{height}\"/></svg>");
    svg
}

fn label(svg: &mut String, text: &str, middle: f64) {
    let x = LABEL_WIDTH - 10.0;
    let _ = write!(
        svg,
        "<text class=\"label\" x=\"{x}\" y=\"{middle:.1}\" dy=\"0.35em\">{}</text>",
        escape(text)
    );
}

fn figure(svg: &mut String, right: f64, middle: f64, text: &str) {
    let x = right + 8.0;
    let _ = write!(
        svg,
        "<text class=\"figure\" x=\"{x:.1}\" y=\"{middle:.1}\" dy=\"0.35em\">{text}</text>"
    );
}

fn legend(svg: &mut String, bars: &[Bar], middle: f64) {
    let mut seen: Vec<&str> = Vec::new();
    let mut left = LABEL_WIDTH;
    for part in bars.iter().flat_map(|bar| &bar.parts) {
        if seen.contains(&part.class) {
            continue;
        }
        seen.push(part.class);
        let _ = write!(
            svg,
            "<rect class=\"{}\" x=\"{left}\" y=\"{:.1}\" width=\"10\" height=\"10\"/>\
             <text class=\"figure\" x=\"{}\" y=\"{middle:.1}\" dy=\"0.35em\">{}</text>",
            part.class,
            middle - 5.0,
            left + 16.0,
            escape(&part.name)
        );
        left += 110.0;
    }
}
