//! What all ranks of a communicator must have in common.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::verdict::Mismatch;

/// One value of an [`Identity`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Value {
    /// A number: a size, a hash.
    Number(u64),
    /// A text: a name, a version.
    Text(String),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Text(text) => write!(f, "'{text}'"),
        }
    }
}

/// Named values that every rank must have in common: sizes of the shape, the layout's hash, versions.
///
/// The meeting place compares them with rank 0's, in the order in which rank 0 gave them, and refuses a rank that
/// differs. Hashes go last: a size that differs says more than the hash that differs for it.
///
/// ```
/// let identity = ep_bootstrap::Identity::new().number("hidden", 7168).text("element", "bf16").number("layout hash", 42);
/// # let _ = identity;
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Identity {
    fields: Vec<(String, Value)>,
}

impl Identity {
    /// Nothing in common yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// With a number.
    #[must_use]
    pub fn number(mut self, name: impl Into<String>, value: u64) -> Self {
        self.fields.push((name.into(), Value::Number(value)));
        self
    }

    /// With a text.
    #[must_use]
    pub fn text(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.fields.push((name.into(), Value::Text(value.into())));
        self
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.fields.iter().find(|(field, _)| field == name).map(|(_, value)| value)
    }

    /// The first field in which `theirs`, on rank `them`, differs from this, on rank `me`.
    pub(crate) fn differs(&self, me: u32, theirs: &Self, them: u32) -> Option<Mismatch> {
        let names = self.fields.iter().chain(&theirs.fields).map(|(name, _)| name);
        let said = |value: Option<&Value>| value.map_or_else(|| "absent".to_owned(), Value::to_string);
        names.map(|name| (name, self.get(name), theirs.get(name))).find(|(_, mine, other)| mine != other).map(
            |(name, mine, other)| Mismatch {
                field: name.clone(),
                values: [said(mine), said(other)],
                ranks: [me, them],
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named_with_both_values_and_ranks() {
        let mine = Identity::new().number("hidden", 7168).text("element", "bf16").number("layout hash", 1);
        let theirs = Identity::new().number("hidden", 7168).text("element", "fp8").number("layout hash", 2);
        let mismatch = mine.differs(0, &theirs, 3).unwrap();
        assert_eq!(mismatch.to_string(), "element is 'bf16' on rank 0 and 'fp8' on rank 3");
        assert_eq!(mine.differs(0, &mine.clone(), 3), None);
    }

    #[test]
    fn a_field_that_one_side_lacks_differs() {
        let mismatch = Identity::new().differs(0, &Identity::new().number("topk", 8), 1).unwrap();
        assert_eq!(mismatch.to_string(), "topk is absent on rank 0 and 8 on rank 1");
    }
}
