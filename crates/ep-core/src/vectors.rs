//! Loops over elements with the widest vectors of this processor.
//!
//! A library for any processor of a family is compiled for its oldest, whose vectors are a quarter as long as those of today's on
//! x86-64, and which cannot multiply and add at once. These loops are compiled for several, of which one is chosen when they run.
//! Results do not depend on it: compilers reorder no sums and fuse no products of their own accord.

use pulp::{Arch, NullaryFnOnce};

/// Calls `each` with all `items`. Where `each` is a closure that calls others, they must be inlined for it to be any faster, and it
/// `#[inline(always)]`.
pub(crate) fn for_each<I: IntoIterator>(items: I, each: impl FnMut(I::Item)) {
    Arch::new().dispatch(Loop(items, each));
}

struct Loop<I, F>(I, F);

impl<I: IntoIterator, F: FnMut(I::Item)> NullaryFnOnce for Loop<I, F> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self(items, mut each) = self;
        for item in items {
            each(item);
        }
    }
}
