//! Inputs that the benchmarks share. The benchmarks are `cargo bench -p moexpress-benches`.
//!
//! | `--bench` | measures |
//! |---|---|
//! | `plan` | planning a dispatch |
//! | `cursors` | a ring's arithmetic, beside `rtrb` |
//! | `engine` | the engine on the explore scheduler, beside `memcpy` |
//! | `timed` | the timed scheduler: events a second |
//! | `near` | near lanes of CPU ranks between two threads, in turn with `rtrb` and copies |
//! | `lanes` | lanes near and, where there is a device, far, as criterion takes them |
//! | `quant` | FP8 arithmetic |
//! | `cuda` | kernels on the GPUs of this host |
//!
//! `docs/benchmarks.md` has what was measured.
//!
//! ```
//! let shape = moexpress_benches::large_shape();
//! let topk_idx = moexpress_benches::routing(&shape, 4, 0); // [tokens, topk], distinct experts for each token
//! assert_eq!((shape.experts(), topk_idx.len()), (256, 4 * 8));
//! ```

use ep_core::Shape;

pub mod calls;
pub mod rings;

/// A layer as large models have them: 256 experts, top-8, hidden 7168, 4096 tokens.
///
/// # Panics
/// Never: the sizes are valid.
pub fn large_shape() -> Shape {
    Shape::builder().build().expect("the default shape is valid")
}

/// `[tokens, topk]` distinct experts for each token, spread evenly, the same in every run; another for each `seed`.
pub fn routing(shape: &Shape, tokens: u32, seed: u64) -> Vec<i64> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64 ^ seed << 32;
    let mut experts: Vec<i64> = (0..i64::from(shape.experts())).collect();
    let topk = shape.topk() as usize;
    let mut topk_idx = Vec::with_capacity(tokens as usize * topk);
    for _ in 0..tokens {
        // The first steps of a Fisher-Yates shuffle: they draw without repetition.
        for at in 0..topk {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let left = (experts.len() - at) as u64;
            experts.swap(at, at + ((state >> 33) % left) as usize);
        }
        topk_idx.extend(&experts[..topk]);
    }
    topk_idx
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_token_chooses_an_expert_twice() {
        let shape = large_shape();
        let topk_idx = routing(&shape, 500, 1);
        for token in topk_idx.chunks(shape.topk() as usize) {
            assert!(token.iter().zip(1..).all(|(expert, next)| !token[next..].contains(expert)), "{token:?}");
        }
    }
}
