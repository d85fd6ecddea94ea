//! What is left of a range without others.

use crate::port::{Offset, Span};

/// What of `span` lies outside of `others`.
pub(super) fn outside(span: Span, others: &[Span]) -> Vec<Span> {
    others.iter().fold(vec![span], |parts, other| {
        let cut = |part: Span| {
            let before = part.offset.span(other.offset.0.min(part.end()).saturating_sub(part.offset.0));
            let from = Offset(other.end().max(part.offset.0));
            [before, from.span(part.end().saturating_sub(from.0))].into_iter().filter(|part| part.len > 0)
        };
        parts.into_iter().flat_map(cut).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_outside_of_others_is_what_a_naive_count_finds() {
        let spans = || (0..7u64).flat_map(|at| (0..7 - at).map(move |len| Offset(at).span(len)));
        let has = |span: &Span, at: u64| span.offset.0 <= at && at < span.end();
        for (span, first) in spans().flat_map(|span| spans().map(move |first| (span, first))) {
            for second in spans() {
                let parts = outside(span, &[first, second]);
                for at in 0..8 {
                    let expected = has(&span, at) && !has(&first, at) && !has(&second, at);
                    let found = parts.iter().filter(|part| has(part, at)).count();
                    assert_eq!(found, usize::from(expected), "{at} of {span:?} without {first:?}, {second:?}");
                }
            }
        }
    }
}
