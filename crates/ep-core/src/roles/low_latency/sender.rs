//! Dispatch: puts each token once to every rank that holds one of its experts.

use zerocopy::IntoBytes;

use super::faults::Held;
use super::{Banks, Call, Faults, Form, Notice, Outbox, Place, Said};
use crate::buffers::HostRows;
use crate::error::Fault;
use crate::layout::{Choice, RowFormat, RowHeader, UnitChoice, UnitRow};
use crate::machine::{Machine, Window};
use crate::plan::{Plan, first_mention};
use crate::plant::Plant;
use crate::port::{Duty, Offset, Port, Work};
use crate::roles::{Attended, HeaderBytes};
use crate::shape::Element;
use crate::topology::Rank;

/// What a rank sends.
pub(crate) struct Tokens<'a, W: Window> {
    /// `[tokens, hidden]` bf16, or `coded`: as it travels.
    pub(crate) x: &'a HostRows<W>,
    pub(crate) coded: bool,
    pub(crate) plan: &'a Plan,
    /// `[tokens, topk]`: experts over all ranks.
    pub(crate) topk_idx: &'a [i64],
    pub(crate) topk_weights: Option<&'a [f32]>,
}

impl<W: Window> Tokens<'_, W> {
    /// How many rows each expert of `rank` gets.
    fn gets(&self, local: u32, rank: Rank) -> &[u32] {
        let first = (rank.0 * local) as usize;
        &self.plan.experts()[first..first + local as usize]
    }

    /// `[tokens, topk]`: of each choice, how many rows of earlier tokens its expert gets.
    fn numbers(&self, experts: u32) -> Vec<u32> {
        let (tokens, mut gets) = (self.plan.tokens().max(1) as usize, vec![0; experts as usize]);
        let choices = self.topk_idx.chunks_exact((self.topk_idx.len() / tokens).max(1));
        choices
            .flat_map(|choices| {
                let numbers: Vec<u32> = choices
                    .iter()
                    .map(|&expert| {
                        usize::try_from(expert).ok().and_then(|expert| gets.get(expert)).map_or(0, |&count| count)
                    })
                    .collect();
                for (at, &expert) in choices.iter().enumerate() {
                    if let Some(count) = usize::try_from(expert).ok().and_then(|expert| gets.get_mut(expert)) {
                        *count += u32::from(first_mention(choices, at) == at);
                    }
                }
                numbers
            })
            .collect()
    }
}

/// A row being made: its header, and its payload as it travels.
struct Staged {
    header: HeaderBytes,
    scratch: Vec<u8>,
    payload: Vec<u8>,
    /// Where rows travel as units: their headers in this form, and `[tokens, topk]`: which row of its expert each choice's is.
    units: Option<(Vec<u8>, Vec<u32>)>,
}

/// Sends all tokens: to the peers whose banks are free at once, to the others as theirs become free.
pub(crate) async fn send_tokens<M: Machine, W: Window>(
    call: &Call<'_, M>,
    tokens: &Tokens<'_, W>,
    outbox: &mut Outbox,
    faults: &mut Faults,
) -> Result<(), Fault> {
    let mut port = call.port(Duty::Sender);
    let row = call.layout.row();
    let mut staged = Staged {
        header: HeaderBytes::new(row),
        scratch: vec![0; row.results().payload_bytes().max(row.payload_bytes()) as usize],
        payload: vec![0; row.payload_bytes() as usize],
        units: call.as_units().then(|| (Vec::new(), tokens.numbers(call.layout.shape().experts()))),
    };
    let mut banks = Banks::new(call, |_| true);
    // The own bank is free: what it held has been received before.
    let mut to = vec![false; call.layout.topology().ranks() as usize];
    to[call.me.index()] = true;
    loop {
        let free = banks.free(call, &port, faults)?;
        free.iter().for_each(|peer| to[peer.index()] = true);
        let ahead = |peer: &Rank| call.form(*peer, call.as_units()).says_ahead();
        let (ahead, behind): (Vec<Rank>, Vec<Rank>) = free.into_iter().partition(ahead);
        tell(call, &mut port, tokens, &mut staged, outbox, &ahead, faults).await?;
        if to.contains(&true) {
            send_to(call, &mut port, tokens, &mut staged, outbox, &to, faults).await?;
        }
        tell(call, &mut port, tokens, &mut staged, outbox, &behind, faults).await?;
        to.fill(false);
        if !banks.wait(call, &mut port, faults).await? {
            break;
        }
    }
    for peer in faults.late() {
        let mut held = Held { rows: Vec::new(), notice: staged.notice(call, tokens, peer) };
        for (position, &token) in (0u32..).zip(tokens.plan.sent_to(peer)) {
            staged.make(call, tokens, token)?;
            held.rows.push((Place::Row { position, token }, staged.to_vec(row)));
        }
        faults.hold(peer, held);
    }
    Ok(())
}

/// Tells each of `peers` how many rows it gets.
async fn tell<M: Machine, W: Window>(
    call: &Call<'_, M>,
    port: &mut Attended<M::Port>,
    tokens: &Tokens<'_, W>,
    staged: &mut Staged,
    outbox: &mut Outbox,
    peers: &[Rank],
    faults: &mut Faults,
) -> Result<(), Fault> {
    for (left, &peer) in (0..peers.len()).rev().zip(peers) {
        port.only_posts(left > 0);
        if !faults.involve(peer) {
            let notice = staged.notice(call, tokens, peer);
            let told = call.announce(port, outbox, faults, peer, &notice).await;
            told.or_else(|fault| faults.note(peer, fault))?;
        }
    }
    Ok(())
}

/// Sends every token to those of its ranks that `to` names.
async fn send_to<M: Machine, W: Window>(
    call: &Call<'_, M>,
    port: &mut Attended<M::Port>,
    tokens: &Tokens<'_, W>,
    staged: &mut Staged,
    outbox: &mut Outbox,
    to: &[bool],
    faults: &mut Faults,
) -> Result<(), Fault> {
    let row = call.layout.row();
    for token in 0..tokens.plan.tokens() {
        port.only_posts(token + 1 < tokens.plan.tokens());
        let reached = tokens.plan.reached(token).iter().filter(|(rank, _)| to[rank.index()]);
        let (mut made, mut place) = (false, None);
        for &(rank, position) in reached {
            if !made {
                staged.make(call, tokens, token)?;
                made = true;
            }
            if rank == call.me {
                staged.write(port, call.layout.low_row(call.op, call.me, position).offset, row)?;
                continue;
            }
            let from = match place {
                Some(from) => from,
                None => {
                    let free = outbox.slot(call, port, faults).await?;
                    let from = call.layout.low_staging(free).offset;
                    staged.write(port, from, row)?;
                    if let Some((header, _)) = &staged.units {
                        port.write(from.plus(row.wire_bytes()), header)?;
                    }
                    place = Some(from);
                    from
                }
            };
            if faults.involve(rank) {
                continue;
            }
            let op = call.op + u64::from(call.plants(Plant::OpInWrongBank));
            let form = call.form(rank, call.as_units());
            match call.put_row(port, rank, from, (op, Place::Row { position, token }, form)).await {
                Ok(posted) => outbox.sent(posted),
                Err(fault) => faults.note(rank, fault)?,
            }
        }
    }
    Ok(())
}

impl Staged {
    /// What `peer` is told of its rows.
    fn notice<M: Machine, W: Window>(&mut self, call: &Call<'_, M>, tokens: &Tokens<'_, W>, peer: Rank) -> Notice {
        let said = Said { rows: tokens.plan.rows()[peer.index()], tokens: tokens.plan.tokens() };
        let form = call.form(peer, call.as_units());
        let details = match form {
            Form::Together => Vec::new(),
            Form::Units => tokens.gets(call.layout.local_experts(), peer).as_bytes().to_vec(),
            Form::EachRow => {
                let mut headers = Vec::new();
                for (rows, &token) in (1..).zip(tokens.plan.sent_to(peer)) {
                    self.make_header(call, tokens, token);
                    headers.extend_from_slice(self.header.as_bytes());
                    headers.resize(rows * call.layout.row().header_bytes() as usize, 0);
                }
                headers
            }
        };
        Notice { said, form, details }
    }

    /// Makes the row of `token`.
    fn make<M: Machine, W: Window>(
        &mut self,
        call: &Call<'_, M>,
        tokens: &Tokens<'_, W>,
        token: u32,
    ) -> Result<(), Fault> {
        self.make_header(call, tokens, token);
        if tokens.coded {
            let row = call.layout.row().payload_bytes() as usize;
            self.payload.copy_from_slice(tokens.x.borrow(token, &mut self.scratch[..row])?);
            return Ok(());
        }
        let results = call.layout.row().results().payload_bytes() as usize;
        let x = tokens.x.borrow(token, &mut self.scratch[..results])?;
        match call.layout.shape().element() {
            Element::Bf16 => self.payload.copy_from_slice(x),
            element => {
                let (codes, scales) = self.payload.split_at_mut(call.layout.row().scales_offset() as usize);
                let (elements, _) = x.as_chunks::<2>();
                let codes = &mut codes[..elements.len()];
                element.quantize(elements, codes, scales).map_err(|_| Fault::Mismatch {
                    field: "elements of a row",
                    mine: call.layout.shape().hidden().into(),
                    theirs: elements.len() as u64,
                    peer: call.me,
                })?;
            }
        }
        Ok(())
    }

    /// Makes its header.
    fn make_header<M: Machine, W: Window>(&mut self, call: &Call<'_, M>, tokens: &Tokens<'_, W>, token: u32) {
        let own = RowHeader { source_rank: call.me.0, source_token: token, position: 0, op: call.stamp() };
        let topk = call.layout.shape().topk() as usize;
        let reached = tokens.plan.reached(token);
        let first = token as usize * topk;
        let choices = &tokens.topk_idx[first..first + topk];
        self.header.set(&own, |at| {
            let Some(expert) = u32::try_from(choices[at]).ok() else { return Choice::NONE };
            let rank = call.layout.rank_of_expert(expert);
            // Choices of masked ranks are dropped here, so that all ranks of the token see the same. An expert gets a row once.
            if !reached.iter().any(|&(reached, _)| reached == rank) || first_mention(choices, at) != at {
                return Choice::NONE;
            }
            Choice { expert: expert as i32, weight: tokens.topk_weights.map_or(1.0, |weights| weights[first + at]) }
        });
        if let Some((units, numbers)) = &mut self.units {
            let row = UnitRow { source_rank: own.source_rank, source_token: token, op: own.op };
            units.clear();
            units.extend_from_slice(row.as_bytes());
            for at in 0..topk {
                let Choice { expert, weight } = self.header.choice(at);
                let index = if expert < 0 { 0 } else { numbers[first + at] };
                units.extend_from_slice(UnitChoice { expert, weight, index }.as_bytes());
            }
        }
    }

    /// Its bytes as they are staged.
    fn to_vec(&self, row: &RowFormat) -> Vec<u8> {
        let mut bytes = self.header.as_bytes().to_vec();
        bytes.resize(row.header_bytes() as usize, 0);
        bytes.extend_from_slice(&self.payload);
        if let Some((units, _)) = &self.units {
            bytes.resize(row.wire_bytes() as usize, 0);
            bytes.extend_from_slice(units);
        }
        bytes
    }

    /// Writes it into the own window.
    fn write(&self, port: &mut impl Port, to: Offset, row: &RowFormat) -> Result<(), Fault> {
        port.charge(Work::Row { bytes: self.payload.len() as u64 });
        port.write(to, self.header.as_bytes())?;
        port.write(to.plus(row.header_bytes()), &self.payload)
    }
}
