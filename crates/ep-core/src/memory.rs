//! What ranks take of a machine's memory, told before any of it is taken.
//!
//! Everything here is arithmetic on sizes. A backend or a command adds up an [`Estimate`] of its parts and holds it
//! against what its machine has left; that is not known here.

use std::fmt;

use crate::error::Error;
use crate::layout::Layout;
use crate::shape::Shape;
use crate::topology::Topology;

/// Bytes of memory by part: a bound that is seldom far above what is taken in the end.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Estimate {
    parts: Vec<(&'static str, u64)>,
}

impl Estimate {
    /// The windows of `ranks` ranks, every byte of them.
    pub fn of_windows(layout: &Layout, ranks: u32) -> Self {
        Self::default().with("windows", u64::from(ranks).saturating_mul(layout.window_bytes()))
    }

    /// The same with another part.
    #[must_use]
    pub fn with(mut self, what: &'static str, bytes: u64) -> Self {
        if bytes > 0 {
            self.parts.push((what, bytes));
        }
        self
    }

    /// That of `count` such things.
    #[must_use]
    pub fn times(mut self, count: u64) -> Self {
        self.parts.iter_mut().for_each(|(_, bytes)| *bytes = bytes.saturating_mul(count));
        self
    }

    /// Name and bytes of each part.
    pub fn parts(&self) -> &[(&'static str, u64)] {
        &self.parts
    }

    /// Bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Refuses more than the `left` bytes that `place` has: `of` says whose memory it is, `remedy` what makes it smaller.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn within(
        &self,
        (place, left): (impl fmt::Display, u64),
        of: impl fmt::Display,
        remedy: &str,
    ) -> Result<(), Error> {
        if self.bytes() <= left {
            return Ok(());
        }
        let limit = format_args!("at most {}, what {place} has left; {remedy}", Size(left));
        Err(Error::invalid(format_args!("memory of {of}"), self, limit))
    }
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "about {}", Size(self.bytes()))?;
        for (at, (what, bytes)) in self.parts.iter().enumerate() {
            write!(f, "{}{what} {}", if at == 0 { " (" } else { ", " }, Size(*bytes))?;
        }
        f.write_str(if self.parts.is_empty() { "" } else { ")" })
    }
}

/// Bytes with a binary unit, to a tenth: `1.5 GiB`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let (mut scaled, mut unit) = (self.0 as f64 / 1024.0, 0);
        while scaled >= 1024.0 && unit + 1 < UNITS.len() {
            scaled /= 1024.0;
            unit += 1;
        }
        write!(f, "{scaled:.1} {}", UNITS[unit])
    }
}

/// Rows that all ranks together receive of `tokens` tokens in a dispatch, as expected where the router chooses experts
/// at random: one for each token and rank that has an expert of it. A router with favourites makes fewer of them.
pub fn rows_received(shape: &Shape, topology: &Topology, tokens: u64) -> u64 {
    let (experts, ranks) = (f64::from(shape.experts()), f64::from(topology.ranks()));
    let local = experts / ranks;
    // Of a token's choices, one after the other and all different, none falls to a given rank.
    let misses = |taken| ((experts - local - f64::from(taken)) / (experts - f64::from(taken))).max(0.0);
    let none: f64 = (0..shape.topk()).map(misses).product();
    (tokens as f64 * ranks * (1.0 - none)).ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Settings;

    fn shape(experts: u32, topk: u32) -> Shape {
        Shape::builder().experts(experts).topk(topk).hidden(64).max_tokens(8).build().unwrap()
    }

    #[test]
    fn every_byte_of_every_window_counts() {
        let (shape, topology) = (shape(8, 2), Topology::new(1, 4).unwrap());
        let layout = Layout::new(&shape, &topology, &Settings::auto(&shape, &topology)).unwrap();
        assert_eq!(Estimate::of_windows(&layout, 4).bytes(), 4 * layout.window_bytes());
    }

    #[test]
    fn a_refusal_names_parts_limit_and_remedy() {
        let estimate = Estimate::default().with("windows", 3 << 30).with("nothing", 0).with("rows", 1 << 29);
        assert_eq!(estimate.within(("this machine", 7 << 29), "4 ranks", ""), Ok(()));
        assert_eq!(
            estimate.within(("this machine", 1 << 30), "4 ranks", "fewer tokens").unwrap_err().to_string(),
            "memory of 4 ranks is about 3.5 GiB (windows 3.0 GiB, rows 512.0 MiB), \
             allowed: at most 1.0 GiB, what this machine has left; fewer tokens"
        );
        let endless = Estimate::default().with("a", u64::MAX).with("b", 1);
        assert_eq!(estimate.clone().times(2).parts(), [("windows", 6 << 30), ("rows", 1 << 30)]);
        assert_eq!((endless.bytes(), endless.to_string().contains("about 16.0 EiB")), (u64::MAX, true));
    }

    #[test]
    fn a_token_goes_once_to_each_rank_that_it_needs() {
        let rows = |experts, topk, ranks, tokens| {
            rows_received(&shape(experts, topk), &Topology::new(1, ranks).unwrap(), tokens)
        };
        assert_eq!(rows(4, 4, 4, 10), 40, "all ranks");
        assert_eq!(rows(4, 4, 1, 10), 10, "one rank");
        assert_eq!(rows(1024, 1, 8, 1000), 1000, "one choice, one rank");
        // Two of four experts on two ranks: both on one with 1 chance in 3.
        assert_eq!(rows(4, 2, 2, 3000), 5000);
        assert_eq!(rows(8, 2, 4, 0), 0);
    }
}
