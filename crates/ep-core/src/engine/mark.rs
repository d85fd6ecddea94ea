//! Whose something is: handles and operations under way belong to one endpoint, in one generation.

use std::sync::Arc;

use crate::error::Error;

/// The endpoint and the generation that made something. An endpoint's own says who it is now.
#[derive(Clone, Debug)]
pub struct Mark {
    endpoint: Arc<()>,
    generation: u16,
}

impl Mark {
    /// That of the endpoint which `endpoint` stands for (the same value for all of its marks, and for nobody else's) in a
    /// generation.
    pub fn new(endpoint: &Arc<()>, generation: u16) -> Self {
        Self { endpoint: Arc::clone(endpoint), generation }
    }

    /// Generation of the communicator.
    pub const fn generation(&self) -> u16 {
        self.generation
    }

    /// Refuses `what`, which bears this mark, to an endpoint that bears `own` now.
    ///
    /// # Errors
    /// [`Error::Invalid`]: it is of another endpoint, or of an earlier generation.
    pub fn check(&self, what: &str, own: &Self) -> Result<(), Error> {
        if !Arc::ptr_eq(&self.endpoint, &own.endpoint) {
            return Err(Error::invalid(what, "of another endpoint", "one of this endpoint"));
        }
        if self.generation != own.generation {
            let limit = format_args!("{}, the communicator's", own.generation);
            return Err(Error::invalid(format_args!("generation of the {what}"), self.generation, limit));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_and_earlier_generations_are_refused() {
        let (one, other) = (Arc::new(()), Arc::new(()));
        let made = Mark::new(&one, 3);
        assert!(made.check("handle", &Mark::new(&one, 3)).is_ok());
        let said = |own: &Mark| made.check("handle", own).unwrap_err().to_string();
        assert_eq!(said(&Mark::new(&other, 3)), "handle is of another endpoint, allowed: one of this endpoint");
        assert_eq!(said(&Mark::new(&one, 4)), "generation of the handle is 3, allowed: 4, the communicator's");
    }
}
