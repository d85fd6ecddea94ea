use crate::backend::Backend;
use crate::harness::Case;
pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    Vec::new()
}
