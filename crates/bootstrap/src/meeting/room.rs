//! Who gives way when there is no room for one more connection.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::connection::Standing;
use super::hall::Guest;

/// Of connections that have not joined, from the oldest on: the one that is farthest from joining, of the source that has most of
/// such, the oldest of those. None when all are of this job.
pub(super) fn gives_way(strangers: impl Iterator<Item = (Guest, Standing, IpAddr)> + Clone) -> Option<Guest> {
    let least = strangers.clone().map(|(_, standing, _)| standing).min()?;
    if least == Standing::Proved {
        return None;
    }
    let mut sources: BTreeMap<IpAddr, (usize, Guest)> = BTreeMap::new();
    for (guest, _, source) in strangers.filter(|&(_, standing, _)| standing == least) {
        sources.entry(source).or_insert((0, guest)).0 += 1;
    }
    sources.into_values().max_by_key(|&(count, _)| count).map(|(_, guest)| guest)
}

#[cfg(test)]
mod tests {
    use super::Standing::{Greeted, Proved, Refused, Silent};
    use super::*;

    /// Which of these gives way, by its place among them: each by its standing and the last number of its address.
    fn chosen(strangers: &[(Standing, u8)]) -> Option<usize> {
        let source = |last| IpAddr::from([127, 0, 0, last]);
        let strangers = strangers.iter().enumerate();
        gives_way(strangers.map(|(at, &(standing, last))| (Guest(at), standing, source(last)))).map(|guest| guest.0)
    }

    /// However few of them there are, and whoever came first.
    #[test]
    fn who_is_farther_from_joining_gives_way_first() {
        assert_eq!(chosen(&[(Proved, 1), (Greeted, 1), (Greeted, 1), (Silent, 2), (Refused, 3)]), Some(4));
        assert_eq!(chosen(&[(Proved, 1), (Greeted, 1), (Greeted, 1), (Silent, 2)]), Some(3));
        assert_eq!(chosen(&[(Proved, 1), (Proved, 1), (Greeted, 2)]), Some(2));
    }

    #[test]
    fn the_source_with_most_connections_gives_way_and_of_it_the_oldest() {
        assert_eq!(chosen(&[(Silent, 1), (Silent, 2), (Silent, 2)]), Some(1));
        assert_eq!(chosen(&[(Silent, 9), (Silent, 2), (Silent, 9)]), Some(0));
        assert_eq!(chosen(&[(Silent, 1), (Silent, 1), (Silent, 2), (Silent, 2), (Silent, 2)]), Some(2));
    }

    /// The ranks of a machine are not held to account for each other.
    #[test]
    fn only_who_is_as_far_from_joining_counts_for_its_source() {
        let strangers = [(Greeted, 1), (Proved, 1), (Proved, 1), (Silent, 1), (Silent, 2), (Silent, 2)];
        assert_eq!(chosen(&strangers), Some(4));
    }

    #[test]
    fn who_has_proved_itself_never_gives_way() {
        assert_eq!(chosen(&[(Proved, 1), (Proved, 1), (Proved, 2)]), None);
        assert_eq!(chosen(&[]), None);
    }
}
