//! Vector clocks: per component, the last event that is known to have happened.

/// A clock; components beyond its length stand at zero.
pub(super) type Clock = Vec<u32>;

/// The last known event of `component`.
pub(super) fn known(clock: &[u32], component: u32) -> u32 {
    clock.get(component as usize).copied().unwrap_or(0)
}

/// Learns of event `at` of `component` and all before it.
pub(super) fn learn(clock: &mut Clock, component: u32, at: u32) {
    let index = component as usize;
    if clock.len() <= index {
        clock.resize(index + 1, 0);
    }
    clock[index] = clock[index].max(at);
}

/// Learns all that `other` knows.
pub(super) fn join(clock: &mut Clock, other: &[u32]) {
    if clock.len() < other.len() {
        clock.resize(other.len(), 0);
    }
    for (mine, &theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(theirs);
    }
}
