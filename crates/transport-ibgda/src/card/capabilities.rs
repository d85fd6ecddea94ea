//! What an adapter can do, and whether that is enough.

use super::Context;
use crate::command::{Message, Opcode, any, cap};
use crate::error::Error;

/// Of `operations`: fetch-add.
const FETCH_ADD: u64 = 1 << 1;
/// Of `size_qp`: eight bytes.
const EIGHT_BYTES: u64 = 1 << 3;
/// Bytes of an element.
const ELEMENT: u64 = 64;

/// What an adapter can do, of what matters here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Capabilities {
    /// Elements of a queue at most, as the power of two.
    pub(crate) log_max_elements: u64,
    /// Completions of a queue at most, as the power of two.
    pub(crate) log_max_completions: u64,
    /// Writes may pass one another where the memory allows that.
    pub(crate) relaxed_ordering: bool,
    completion_version: u64,
    longest_element: u64,
    reliable_connections: bool,
    roce: bool,
    atomics: bool,
    atomic_operations: u64,
    atomic_sizes: u64,
}

impl Capabilities {
    pub(crate) fn of(context: &Context) -> Result<Self, Error> {
        let ask = |kind: u64| {
            // The current ones, not the greatest possible.
            let message = Message::new(Opcode::QueryHcaCap).with(any::OP_MOD, kind << 1 | 1);
            context.general(Opcode::QueryHcaCap.name(), &message, cap::ANSWER)
        };
        let general = ask(cap::GENERAL)?;
        let has = |field| general.get(field) != 0;
        let atomics = has(cap::ATOMICS);
        let atomic = if atomics { ask(cap::ATOMIC)? } else { Message::answer(cap::ANSWER) };
        Ok(Self {
            log_max_elements: general.get(cap::LOG_MAX_QP_SZ),
            log_max_completions: general.get(cap::LOG_MAX_CQ_SZ),
            relaxed_ordering: has(cap::RELAXED_ORDERING_WRITE),
            completion_version: general.get(cap::CQE_VERSION),
            longest_element: general.get(cap::MAX_WQE_SZ_SQ),
            reliable_connections: has(cap::RC),
            roce: has(cap::ROCE),
            atomics,
            atomic_operations: atomic.get(cap::ATOMIC_OPERATIONS),
            atomic_sizes: atomic.get(cap::ATOMIC_SIZE_QP),
        })
    }

    /// Refuses an adapter that lacks what nothing can do without.
    pub(crate) fn check(&self, device: &str, ethernet: bool) -> Result<(), Error> {
        let lacks = |what, value, needs| Err(Error::Capability { device: device.to_owned(), what, value, needs });
        if self.completion_version != 1 {
            return lacks("completion version", self.completion_version, "1, which ConnectX-4 and later have");
        }
        if !self.reliable_connections {
            return lacks("reliable connections", 0, "them");
        }
        if ethernet && !self.roce {
            return lacks("RoCE", 0, "it on: `devlink dev param set ... name enable_roce value true`");
        }
        if self.longest_element < ELEMENT {
            return lacks("elements of bytes", self.longest_element, "64");
        }
        if !self.atomics || self.atomic_operations & FETCH_ADD == 0 || self.atomic_sizes & EIGHT_BYTES == 0 {
            let needs = "fetch-add of 8 bytes: `mlxconfig` on PCI_ATOMIC_MODE, or `--far roce`";
            return lacks("atomic operations", self.atomic_operations, needs);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_adapter_lacks_is_named_with_a_remedy() {
        let whole = Capabilities {
            log_max_elements: 15,
            log_max_completions: 22,
            relaxed_ordering: true,
            completion_version: 1,
            longest_element: 1024,
            reliable_connections: true,
            roce: true,
            atomics: true,
            atomic_operations: 3,
            atomic_sizes: 8,
        };
        assert!(whole.check("mlx5_0", true).is_ok());
        let said = |lacking: Capabilities| lacking.check("mlx5_0", true).unwrap_err().to_string();
        assert_eq!(
            said(Capabilities { completion_version: 0, ..whole }),
            "mlx5_0 has completion version 0, needed: 1, which ConnectX-4 and later have"
        );
        assert!(said(Capabilities { atomics: false, ..whole }).contains("PCI_ATOMIC_MODE"));
        assert!(said(Capabilities { atomic_operations: 1, ..whole }).contains("fetch-add of 8 bytes"));
        assert!(said(Capabilities { atomic_sizes: 4, ..whole }).contains("fetch-add of 8 bytes"));
        assert!(said(Capabilities { roce: false, ..whole }).contains("enable_roce"));
        assert!(Capabilities { roce: false, ..whole }.check("mlx5_0", false).is_ok(), "InfiniBand");
    }
}
