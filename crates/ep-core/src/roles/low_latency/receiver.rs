//! Dispatch: takes the rows out of the slots and spreads them to the local experts.

use std::ops::Range;

use super::reducer::arrived;
use super::units::UnitRows;
use super::{Asked, Call, Form, Said};
use crate::buffers::HostRows;
use crate::error::Fault;
use crate::layout::LowKind;
use crate::machine::{Machine, Window};
use crate::plan::Plan;
use crate::plant::Plant;
use crate::port::{Duty, Port, Work};
use crate::roles::{Attended, HeaderBytes};
use crate::room::zeroed;
use crate::topology::Rank;

/// One choice of a received row: the expert's row that was made of it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Pick {
    /// Row in `[local experts, ranks * max_tokens]`.
    pub(crate) row: u32,
    pub(crate) weight: f32,
}

/// One received row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Row {
    /// The token at its source.
    pub(crate) token: u32,
    /// Its choices of local experts, ascending: a range of all picks.
    pub(crate) picks: Range<u32>,
}

/// What is told of rows that lie by source, `[ranks * max_tokens, ...]`.
pub(crate) struct BySource {
    /// `[.., topk]`: expert of each choice on this rank, or -1.
    pub(crate) topk_idx: Vec<i64>,
    /// `[.., topk]`: weight of each choice; 0 where there is none.
    pub(crate) topk_weights: Vec<f32>,
    /// The rank of each row; 0 where there is none.
    pub(crate) source_rank: Vec<i32>,
}

/// What a rank received.
pub(crate) struct Intake<W: Window> {
    /// `[local experts, ranks * max_tokens]`, or by source `[ranks * max_tokens]`: rows as they travelled.
    pub(crate) x: HostRows<W>,
    /// As many: token at its source; 0 where there is no row.
    pub(crate) source_token: Vec<i32>,
    /// Where rows lie by source.
    pub(crate) by_source: Option<BySource>,
    /// `[local experts, ranks]`: first row of the rank's segment and its length.
    pub(crate) segments: Vec<(u32, u32)>,
    /// `[local experts]`: rows of each.
    pub(crate) counts: Vec<u32>,
    /// `[ranks]`: the rows of each rank, a range of all rows.
    pub(crate) sources: Vec<Range<u32>>,
    /// `[ranks]`: tokens of each, where rows travel as units.
    pub(crate) tokens: Vec<u32>,
    pub(crate) rows: Vec<Row>,
    pub(crate) picks: Vec<Pick>,
}

/// Receives all rows: the sources in ascending order, so that every expert's rows lie in order of source and token,
/// whatever the order in which they came. Those of `plan` for this rank stay here. `by_source`: each row lies once, and not for each of its
/// experts.
pub(crate) async fn receive_tokens<M: Machine, W: Window>(
    call: &Call<'_, M>,
    plan: &Plan,
    by_source: bool,
) -> Result<Intake<W>, Fault> {
    let own = Said { rows: plan.rows()[call.me.index()], tokens: plan.tokens() };
    let mut port = call.port(Duty::Receiver);
    let mut intake = Intake::new(call, by_source)?;
    for source in call.layout.topology().all() {
        let Said { rows, tokens } = if source == call.me {
            own
        } else if !call.mask.contains(source) {
            call.arrival(&mut port, source, call.as_units()).await?
        } else {
            Said::default()
        };
        intake.tokens.push(tokens);
        check_rows(call, source, rows)?;
        intake.take(call, &mut port, source, rows).await?;
    }
    call.received(&mut port).await?;
    Ok(intake)
}

/// Waits for what an operation brings, of the peers that owe something, and does not look at it: this rank had it dropped. Its bank
/// may be filled again when everything has come, not before: what is still on its way would fall upon what comes next.
pub(crate) async fn skip<M: Machine>(call: &Call<'_, M>, asked: &Asked<'_>) -> Result<(), Fault> {
    let mut port = call.port(Duty::Receiver);
    let mut payload = vec![0; call.layout.row().results().payload_bytes() as usize];
    for &peer in call.peers {
        if call.plants(Plant::SkippedWithoutWaiting) {
            continue;
        }
        match call.kind {
            LowKind::Dispatch => {
                let Said { rows, .. } = call.arrival(&mut port, peer, call.as_units()).await?;
                check_rows(call, peer, rows)?;
                match call.form(peer, call.as_units()) {
                    Form::Units => call.skip_units(&mut port, peer, rows).await?,
                    Form::EachRow => call.skip_announced(&mut port, peer, rows).await?,
                    Form::Together => {}
                }
            }
            LowKind::PerChoice | LowKind::PerRank => {
                arrived(call, &mut port, asked, peer).await?;
                let as_units = call.results_as_units(asked.plan.tokens());
                for (token, column) in asked.due(call.layout, call.kind, peer) {
                    if as_units {
                        call.take_result(&mut port, peer, (token, column), &mut payload).await?;
                    } else {
                        call.await_row(&mut port, peer, token).await?;
                    }
                }
            }
        }
    }
    call.received(&mut port).await
}

/// Refuses more rows of `source` than there may be.
fn check_rows<M: Machine>(call: &Call<'_, M>, source: Rank, rows: u32) -> Result<(), Fault> {
    let most = call.layout.shape().max_tokens();
    if rows <= most {
        return Ok(());
    }
    Err(Fault::Mismatch { field: "rows of a source", mine: most.into(), theirs: rows.into(), peer: source })
}

impl<W: Window> Intake<W> {
    fn new<M: Machine>(call: &Call<'_, M>, by_source: bool) -> Result<Self, Fault> {
        let (layout, ranks) = (call.layout, call.layout.topology().ranks() as usize);
        let experts = layout.local_experts() as usize;
        let (stride, topk) = (ranks * layout.shape().max_tokens() as usize, layout.shape().topk() as usize);
        let room = if by_source { stride } else { experts * stride };
        let told = || {
            let (topk_weights, source_rank) = (zeroed(stride * topk)?, zeroed(stride)?);
            Ok::<_, Fault>(BySource { topk_idx: vec![-1; stride * topk], topk_weights, source_rank })
        };
        Ok(Self {
            x: HostRows::zeroed(room as u32, layout.row().payload_bytes() as usize)?,
            source_token: zeroed(room)?,
            by_source: by_source.then(told).transpose()?,
            segments: vec![(0, 0); experts * ranks],
            counts: vec![0; experts],
            sources: Vec::with_capacity(ranks),
            tokens: Vec::with_capacity(ranks),
            rows: Vec::new(),
            picks: Vec::new(),
        })
    }

    /// Takes the rows of one source.
    async fn take<M: Machine>(
        &mut self,
        call: &Call<'_, M>,
        port: &mut Attended<M::Port>,
        source: Rank,
        rows: u32,
    ) -> Result<(), Fault> {
        let first = self.rows.len() as u32;
        let ranks = call.layout.topology().ranks() as usize;
        let segment = |expert| expert * ranks + source.index();
        for (expert, &count) in self.counts.iter().enumerate() {
            self.segments[segment(expert)].0 = count;
        }
        let comes = source != call.me && !call.mask.contains(source);
        let form = if comes { call.form(source, call.as_units()) } else { Form::Together };
        let mut units = if form == Form::Units { Some(UnitRows::begin(call, port, source).await?) } else { None };
        let mut in_slot = HeaderBytes::new(call.layout.row());
        let mut least = 0;
        for position in 0..rows {
            let slot = call.layout.low_row(call.op, source, position).offset;
            match (&mut units, form) {
                (Some(units), _) => units.take(call, port, position).await?,
                (None, Form::EachRow) => {
                    port.read(call.layout.low_head(call.op, source, position).offset, in_slot.as_mut_bytes())?;
                }
                (None, _) => port.read(slot, in_slot.as_mut_bytes())?,
            }
            let header = units.as_ref().map_or(&in_slot, |units| &units.header);
            let own = header.header();
            call.check(&own, source, None)?;
            let mismatch = |field, mine: u32| Fault::Mismatch {
                field,
                mine: mine.into(),
                theirs: own.source_token.into(),
                peer: source,
            };
            if own.source_token < least {
                return Err(mismatch("least token of the next row", least));
            }
            if own.source_token >= call.layout.shape().max_tokens() {
                return Err(mismatch("tokens of a source", call.layout.shape().max_tokens()));
            }
            least = own.source_token + 1;
            let slot = if form == Form::EachRow {
                call.await_row(port, source, own.source_token).await?;
                call.layout.low_row(call.op, source, own.source_token).offset
            } else {
                slot
            };
            let payload = slot.plus(call.layout.row().header_bytes());
            let read = |part: Range<usize>, into: &mut [u8]| match &units {
                Some(units) => {
                    into.copy_from_slice(&units.payload[part]);
                    Ok(())
                }
                None => port.read(payload.plus(part.start as u64), into),
            };
            if self.by_source.is_some() {
                self.lay(call, port, (header, source), read)?;
            } else {
                self.spread(call, port, header, read)?;
            }
        }
        units.map_or(Ok(()), |units| units.end())?;
        self.sources.push(first..self.rows.len() as u32);
        for (expert, &count) in self.counts.iter().enumerate() {
            let (start, rows) = &mut self.segments[segment(expert)];
            *rows = count - *start;
        }
        Ok(())
    }

    /// Copies a row behind those that came before it: `read` copies these bytes of its payload.
    fn lay<M: Machine>(
        &mut self,
        call: &Call<'_, M>,
        port: &Attended<M::Port>,
        (header, source): (&HeaderBytes, Rank),
        read: impl FnMut(Range<usize>, &mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let Some(told) = &mut self.by_source else { return Ok(()) };
        let (layout, token) = (call.layout, header.header().source_token);
        let (row, topk) = (self.rows.len(), layout.shape().topk() as usize);
        for choice in 0..topk {
            let picked = header.choice(choice);
            let Ok(expert) = u32::try_from(picked.expert) else { continue };
            if layout.rank_of_expert(expert) != call.me {
                continue;
            }
            let local = expert % layout.local_experts();
            self.counts[local as usize] += 1;
            told.topk_idx[row * topk + choice] = local.into();
            told.topk_weights[row * topk + choice] = picked.weight;
        }
        port.charge(Work::Row { bytes: self.x.row_bytes() as u64 });
        self.x.fill(row as u32, read)?;
        self.source_token[row] = token as i32;
        told.source_rank[row] = source.0 as i32;
        // What comes back of it is the row's result as it is.
        let pick = self.picks.len() as u32;
        self.picks.push(Pick { row: row as u32, weight: 1.0 });
        self.rows.push(Row { token, picks: pick..pick + 1 });
        Ok(())
    }

    /// Copies a row to each of its local experts: `read` copies these bytes of its payload.
    fn spread<M: Machine>(
        &mut self,
        call: &Call<'_, M>,
        port: &Attended<M::Port>,
        header: &HeaderBytes,
        mut read: impl FnMut(Range<usize>, &mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let layout = call.layout;
        let (local, topk) = (layout.local_experts(), layout.shape().topk());
        let stride = layout.topology().ranks() * layout.shape().max_tokens();
        let first = self.picks.len() as u32;
        let token = header.header().source_token;
        for picked in (0..topk).map(|choice| header.choice(choice as usize)) {
            let Ok(expert) = u32::try_from(picked.expert) else { continue };
            if layout.rank_of_expert(expert) != call.me {
                continue;
            }
            let expert = expert % local;
            let row = expert * stride + self.counts[expert as usize];
            self.counts[expert as usize] += 1;
            port.charge(Work::Row { bytes: self.x.row_bytes() as u64 });
            self.x.fill(row, &mut read)?;
            self.source_token[row as usize] = token as i32;
            self.picks.push(Pick { row, weight: picked.weight });
        }
        self.rows.push(Row { token, picks: first..self.picks.len() as u32 });
        Ok(())
    }
}
