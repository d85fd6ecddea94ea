//! When each rank dispatched and combined.

use super::{Text, bars, nanos};

/// Ranks that a page shows.
const MOST: usize = 64;

/// `[start, end]` of dispatch and combine, in nanoseconds.
pub(super) type Spans = [[f64; 2]; 2];

/// A line for each rank, the slowest where there are many; and what there is to say of that.
pub(super) fn timeline(ranks: &[Spans]) -> (String, String) {
    let first = ranks.iter().flatten().map(|span| span[0]).fold(f64::INFINITY, f64::min);
    let last = ranks.iter().flatten().map(|span| span[1]).fold(0.0, f64::max);
    let all = (last - first).max(1.0);
    let mut shown: Vec<usize> = (0..ranks.len()).collect();
    if ranks.len() > MOST {
        shown.sort_by(|&a, &b| ranks[b][1][1].total_cmp(&ranks[a][1][1]));
        shown.truncate(MOST);
        shown.sort_unstable();
    }
    let line = |rank: usize| {
        let part = |class: &str, [start, end]: [f64; 2]| {
            let (x, width) = (1000.0 * (start - first) / all, (1000.0 * (end - start) / all).max(1.0));
            format!("<rect class=\"{class}\" x=\"{x:.1}\" y=\"0\" width=\"{width:.1}\" height=\"10\"/>")
        };
        let [dispatch, combine] = ranks[rank];
        let [there, back] = [dispatch, combine].map(|span| nanos(span[1] - span[0]));
        format!(
            "<span class=\"name\">rank {rank}</span><svg class=\"slim\" viewBox=\"0 0 1000 10\" preserveAspectRatio=\"none\" role=\"img\">\
             <title>{}</title><rect class=\"track\" x=\"0\" y=\"0\" width=\"1000\" height=\"10\"/>{}{}</svg><span class=\"value\">{}</span>",
            Text(format_args!("rank {rank}: dispatch {there}, combine {back}")),
            part("there", dispatch),
            part("back", combine),
            Text(format_args!("{there} + {back}")),
        )
    };
    let lines: String = shown.iter().map(|&rank| line(rank)).collect();
    let ends = [nanos(0.0), nanos(all / 2.0), nanos(all)];
    let note = if shown.len() < ranks.len() {
        format!("The {MOST} of {} ranks that ended last. ", ranks.len())
    } else {
        String::new()
    };
    (format!("<figure class=\"rows\">{lines}<span></span>{}</figure>", bars::axis(&ends)), note)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_lie_between_the_first_start_and_the_last_end() {
        let (html, note) = timeline(&[[[100.0, 200.0], [300.0, 400.0]], [[150.0, 300.0], [350.0, 500.0]]]);
        assert!(
            html.contains("x=\"0.0\" y=\"0\" width=\"250.0\"") && html.contains("x=\"625.0\" y=\"0\" width=\"375.0\""),
            "{html}"
        );
        assert_eq!((html.matches("rank 1<").count(), note.as_str()), (1, ""));
    }

    #[test]
    fn of_many_ranks_the_last_are_shown() {
        let ranks: Vec<Spans> = (0..100).map(|rank| [[0.0, 1.0], [1.0, 2.0 + f64::from(rank)]]).collect();
        let (html, note) = timeline(&ranks);
        assert!(html.contains("rank 99<") && !html.contains("rank 35<"));
        assert!(note.contains("64 of 100"));
    }
}
