//! The kinds of routing, as text and against a shape.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use ep_core::{Error, Shape};

/// How tokens choose experts.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum RoutingKind {
    /// Every set of topk experts is equally likely.
    #[default]
    Uniform,
    /// Group-limited gating as in DeepSeek-V3: experts lie in groups of equal size; a token takes the groups whose two
    /// best experts score highest in sum, and its topk experts among these.
    Grouped {
        /// Groups that the experts lie in.
        groups: u32,
        /// Groups that a token uses at most.
        limit: u32,
    },
    /// The n-th most popular expert is chosen with a weight of `n^-exponent` (Zipf's law), without replacement; which
    /// expert is the n-th depends on the seed.
    Skewed {
        /// Zipf exponent, at least 0; 0 is uniform.
        exponent: f64,
    },
    /// Every token's first choice is expert 0; it has no others.
    Single,
}

/// Of Zipf's law. With larger ones all experts but the first few are as rare as they can be.
const EXPONENTS: RangeInclusive<f64> = 0.0..=1000.0;

const FORMS: &str = "uniform, grouped:G:L, skewed:A or single";

impl RoutingKind {
    /// Refuses a kind that cannot be drawn for a shape.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the value that does not fit.
    pub fn check(&self, shape: &Shape) -> Result<(), Error> {
        match *self {
            Self::Uniform | Self::Single => Ok(()),
            Self::Skewed { exponent } if EXPONENTS.contains(&exponent) => Ok(()),
            Self::Skewed { exponent } => Err(Error::invalid("exponent A of skewed:A", exponent, "0 to 1000")),
            Self::Grouped { groups, limit } => {
                let experts = shape.experts();
                if groups == 0 || !experts.is_multiple_of(groups) {
                    let limit = format_args!("a divisor of the {experts} experts");
                    return Err(Error::invalid("groups G of grouped:G:L", groups, limit));
                }
                let least = shape.topk().div_ceil(experts / groups);
                if limit < least || limit > groups {
                    let allowed = format_args!(
                        "{least} to {groups}: top-{} of groups of {} experts",
                        shape.topk(),
                        experts / groups
                    );
                    return Err(Error::invalid("groups per token L of grouped:G:L", limit, allowed));
                }
                Ok(())
            }
        }
    }
}

impl fmt::Display for RoutingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Grouped { groups, limit } => write!(f, "grouped:{groups}:{limit}"),
            Self::Skewed { exponent } => write!(f, "skewed:{exponent}"),
            Self::Single => f.write_str("single"),
        }
    }
}

impl FromStr for RoutingKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let refuse = |limit: &str| Error::invalid("routing", format_args!("\"{text}\""), limit);
        let parts: Vec<&str> = text.split(':').collect();
        match parts[..] {
            ["uniform"] => Ok(Self::Uniform),
            ["single"] => Ok(Self::Single),
            ["grouped", groups, limit] => match (groups.parse(), limit.parse()) {
                (Ok(groups), Ok(limit)) => Ok(Self::Grouped { groups, limit }),
                _ => Err(refuse("grouped:G:L with two whole numbers, for example grouped:8:4")),
            },
            ["grouped", ..] => Err(refuse("grouped:G:L, for example grouped:8:4")),
            ["skewed", exponent] => match exponent.parse::<f64>() {
                Ok(exponent) if EXPONENTS.contains(&exponent) => Ok(Self::Skewed { exponent }),
                _ => Err(refuse("skewed:A with A 0 to 1000, for example skewed:1.2")),
            },
            ["skewed", ..] => Err(refuse("skewed:A, for example skewed:1.2")),
            _ => Err(refuse(FORMS)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_read_back_what_they_print() {
        for text in ["uniform", "grouped:8:4", "skewed:1.25", "skewed:0", "single"] {
            assert_eq!(text.parse::<RoutingKind>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn text_that_is_no_kind_is_refused_with_the_allowed_form() {
        let error = |text: &str| text.parse::<RoutingKind>().unwrap_err().to_string();
        assert_eq!(error("zipf"), "routing is \"zipf\", allowed: uniform, grouped:G:L, skewed:A or single");
        assert_eq!(error("grouped:8"), "routing is \"grouped:8\", allowed: grouped:G:L, for example grouped:8:4");
        assert!(error("grouped:8:-1").contains("two whole numbers"));
        assert!(error("skewed:1e308").contains("A 0 to 1000"));
        assert!(error("skewed:-1").contains("A 0 to 1000") && error("skewed:nan").contains("A 0 to 1000"));
    }

    #[test]
    fn groups_must_divide_the_experts_and_hold_topk() {
        let shape = Shape::builder().experts(64).topk(6).build().unwrap();
        let error = |text: &str| text.parse::<RoutingKind>().unwrap().check(&shape).unwrap_err().to_string();
        assert_eq!(error("grouped:7:2"), "groups G of grouped:G:L is 7, allowed: a divisor of the 64 experts");
        assert_eq!(
            error("grouped:16:1"),
            "groups per token L of grouped:G:L is 1, allowed: 2 to 16: top-6 of groups of 4 experts"
        );
        assert!(error("grouped:8:9").contains("is 9, allowed: 1 to 8"));
        assert!("grouped:16:2".parse::<RoutingKind>().unwrap().check(&shape).is_ok());
    }
}
