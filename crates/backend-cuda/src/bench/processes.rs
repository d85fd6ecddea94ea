//! The same measurements on ranks that are processes, as those of most users are: windows of the others are mapped.

use std::slice;
use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::Member;
use ep_core::layout::KernelWindow;
use ep_core::{Error, Rank};

use super::{Blocks, Gate, Plan, Times, devices, one, slowest_of};
use crate::build::{self, Source};
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::memory;
use crate::node::{Node, window};
use crate::rank::{Options, RankDevice};

/// How long ranks wait for each other: one may have kernels to compile, or rows to compare.
const WITHIN: Duration = Duration::from_secs(120);

/// Where the processes wait for each other.
struct Met<'a>(&'a Member);

impl Gate for Met<'_> {
    fn pass(&self) -> Result<(), Error> {
        Ok(self.0.barrier(WITHIN).map_err(CudaError::meeting)?)
    }
}

/// Measures on ranks that are processes, of which this is one: as [`run`](super::run), on rank 0; none on the others.
///
/// # Errors
/// What is missing, what a kernel reported, or that another rank did not come.
pub fn run_member(plan: &Plan, shapes: &[Blocks], member: &Arc<Member>) -> Result<Option<Vec<Times>>, Error> {
    if member.world() != plan.ranks {
        return Err(Error::invalid("ranks", plan.ranks, format_args!("{}, the processes", member.world())));
    }
    let (layout, me) = (plan.layout()?, member.rank());
    let own = || {
        let device = devices(plan.ranks)?.swap_remove(me.index());
        memory::admit(slice::from_ref(&device), &plan.footprint()?)?;
        // Before the ranks wait for each other: it may take long.
        let shape = build::specialises().then(|| KernelWindow::from(&layout));
        Kernels::of(&device, false, None, shape.as_ref())?;
        let window = window(&device, &layout, false)?;
        let handle = window.handle()?.to_bytes().to_vec();
        Ok((device, window, handle))
    };
    let ((device, window, _), handles) =
        member.try_all_gather(own(), |(.., handle)| handle.clone(), WITHIN, CudaError::meeting)?;
    let (node, reached) = Node::met(&device, window, &layout, member, WITHIN, &handles);
    // Nobody begins before all reach all.
    member.try_all_gather(reached, |()| Vec::new(), WITHIN, CudaError::meeting)?;
    let options = Options::of_bench(1);
    let rank = RankDevice::new(&device, &layout, me, &node, options, None, None)?;
    drop(node);
    rank.prepare(&[Source::Meet, Source::Ceiling])?;
    let times = one(plan, shapes, rank, me.0, &Met(member))?;
    let told: Vec<u8> = times.iter().flat_map(|times| times.numbers()).flat_map(f64::to_le_bytes).collect();
    let all = member.all_gather(&told, WITHIN).map_err(CudaError::meeting)?;
    if me != Rank(0) {
        return Ok(None);
    }
    let all = all.into_iter().flatten().map(|told| read(&told)).collect::<Vec<_>>();
    Ok(Some(slowest_of(&all, shapes.len())))
}

/// Numbers of [`Times`].
const NUMBERS: usize = 9;

impl Times {
    fn numbers(&self) -> [f64; NUMBERS] {
        let Self { ceiling, layout, counts, cached, fresh, combine, anywhere, rows, wrong } = *self;
        [ceiling, layout, counts, cached, fresh, combine, anywhere, f64::from(rows), wrong as f64]
    }

    fn of_numbers([ceiling, layout, counts, cached, fresh, combine, anywhere, rows, wrong]: [f64; NUMBERS]) -> Self {
        Self { ceiling, layout, counts, cached, fresh, combine, anywhere, rows: rows as u32, wrong: wrong as u64 }
    }
}

/// What a rank told: the times of each shape.
fn read(told: &[u8]) -> Vec<Times> {
    let numbers = told.chunks_exact(8).map(|bytes| f64::from_le_bytes(bytes.try_into().unwrap_or_default()));
    let numbers: Vec<f64> = numbers.collect();
    numbers.chunks_exact(NUMBERS).map(|of| Times::of_numbers(std::array::from_fn(|at| of[at]))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_of_all_processes_is_told() {
        let times = |ceiling, cached, wrong| Times { ceiling, cached, wrong, rows: 7, ..Times::default() };
        let told =
            |times: &[Times]| -> Vec<u8> { times.iter().flat_map(Times::numbers).flat_map(f64::to_le_bytes).collect() };
        let all = [
            read(&told(&[times(300.0, 5.5, 0), times(1.0, 1.0, 0)])),
            read(&told(&[times(200.0, 4.5, 2), times(2.0, 3.0, 0)])),
        ];
        let slowest = slowest_of(&all, 2);
        assert_eq!(slowest[0].numbers(), times(200.0, 5.5, 2).numbers());
        assert_eq!(slowest[1].numbers(), times(1.0, 3.0, 0).numbers());
    }
}
