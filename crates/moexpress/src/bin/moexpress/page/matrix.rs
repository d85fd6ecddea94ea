//! Who sends how much to whom: a square for each pair.

use std::fmt::Write;

use super::Text;

/// Squares that have room for their number.
const NUMBERED: usize = 16;
/// Width of a square, and of the room for names.
const CELL: f64 = 10.0;

/// `values[from][to]`, darker for more. Every `node` neighbours are outlined together; `unit` is what values are of.
pub(super) fn matrix(values: &[Vec<u64>], node: usize, of: &str, unit: &str) -> String {
    let ranks = values.len();
    let most = values.iter().flatten().copied().max().unwrap_or(0).max(1) as f64;
    let names = ranks.div_ceil(NUMBERED);
    let room = CELL * (ranks as f64 / NUMBERED as f64).max(1.0) * 0.8;
    let scale = room / (CELL * 0.8);
    let mut shapes = String::new();
    for (from, line) in values.iter().enumerate() {
        for (to, &value) in line.iter().enumerate() {
            let (x, y) = (room + CELL * to as f64, room + CELL * from as f64);
            let share = value as f64 / most;
            let place = format!("x=\"{x:.2}\" y=\"{y:.2}\" width=\"9.4\" height=\"9.4\" rx=\"1.2\"");
            let told = format!("{of} {from} to {to}: {value} {unit}");
            write!(shapes, "<rect class=\"base\" {place}/><rect class=\"cell\" {place} fill-opacity=\"{share:.3}\">")
                .and_then(|()| write!(shapes, "<title>{}</title></rect>", Text(told)))
                .expect("writing to a string does not fail");
            if ranks <= NUMBERED && value > 0 {
                let class = if share > 0.55 { "hot" } else { "cold" };
                shapes += &label(x + 4.7, y + 4.7, 1.0, class, &short(value));
            }
        }
    }
    for at in (0..ranks).step_by(names) {
        let middle = room + CELL * at as f64 + 4.7;
        shapes += &label(middle, room / 2.0, scale, "", &at.to_string());
        shapes += &label(room / 2.0, middle, scale, "", &at.to_string());
    }
    if node < ranks {
        for (a, b) in (0..ranks).step_by(node).flat_map(|a| (0..ranks).step_by(node).map(move |b| (a, b))) {
            let (x, y, side) = (room + CELL * a as f64 - 0.3, room + CELL * b as f64 - 0.3, CELL * node as f64);
            shapes +=
                &format!("<rect class=\"node\" x=\"{x:.2}\" y=\"{y:.2}\" width=\"{side:.2}\" height=\"{side:.2}\"/>");
        }
    }
    let side = room + CELL * ranks as f64;
    // Numbers need their room: where there is none, the figure is moved about in its frame.
    let dense = if (9..=NUMBERED).contains(&ranks) { " dense" } else { "" };
    format!(
        "<figure class=\"matrix wide{dense}\"><svg viewBox=\"0 0 {side:.1} {side:.1}\" role=\"img\">{shapes}</svg></figure>"
    )
}

fn label(x: f64, y: f64, scale: f64, class: &str, text: &str) -> String {
    let size = 3.0 * scale;
    format!("<text class=\"{class}\" x=\"{x:.2}\" y=\"{y:.2}\" style=\"font-size:{size:.2}px\">{}</text>", Text(text))
}

/// At most four characters.
fn short(value: u64) -> String {
    match value {
        0..10_000 => value.to_string(),
        10_000..1_000_000 => format!("{}k", value / 1000),
        _ => format!("{}M", value / 1_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_has_a_square_and_nodes_an_outline() {
        let html = matrix(&vec![vec![3; 4]; 4], 2, "rank", "rows");
        assert_eq!((html.matches("class=\"cell\"").count(), html.matches("class=\"node\"").count()), (16, 4));
        assert!(html.contains("rank 1 to 2: 3 rows") && html.contains("fill-opacity=\"1.000\""));
    }

    #[test]
    fn numbers_fit_their_squares() {
        assert_eq!([0, 9999, 54_321, 7_654_321].map(short), ["0", "9999", "54k", "7M"]);
    }
}
