//! Records as a Chrome trace, which <https://ui.perfetto.dev> opens.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use super::{Record, Verb};
use crate::port::{Cell, Counter, LaneId, Nanos, Role};
use crate::topology::Rank;

/// Writes `records` as Chrome trace-event JSON: a process per rank, a thread per role, waits as bars, other verbs as
/// slices of one nanosecond, and an arrow from each publish to the waits that it ended.
///
/// `records` are in the order in which they were taken; those of one role ascend in time. Arrows need comparable clocks,
/// and are drawn only to waits that ended because of their first need, the only one that records name. A wait that never
/// ended lasts until the last record.
///
/// # Errors
/// Those of `out`.
pub fn perfetto(records: &[Record], out: &mut impl Write) -> fmt::Result {
    let threads = Threads::of(records);
    let publishes = Publishes::of(records);
    let mut events = Events { out, first: true, arrows: 0 };
    events.out.write_str("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
    threads.announce(&mut events)?;
    let mut waits = BTreeMap::new();
    for record in records {
        match record.verb {
            Verb::Wait { cell, at_least } => {
                waits.insert((record.rank, record.role), Wait { record, cell, at_least });
            }
            Verb::Woke { index } => {
                if let Some(wait) = waits.remove(&(record.rank, record.role)) {
                    wait.draw(&mut events, &threads, record.at, Some(index))?;
                    if let Some(publish) = publishes.ending(&wait, record.at).filter(|_| index == Some(0)) {
                        events.arrow(&threads, publish, wait.record, record.at)?;
                    }
                }
            }
            _ => draw_verb(&mut events, &threads, record)?,
        }
    }
    let end = records.iter().map(|record| record.at).max().unwrap_or_default();
    waits.values().try_for_each(|wait| wait.draw(&mut events, &threads, end, None))?;
    events.out.write_str("\n]}\n")
}

/// Numbers for processes and threads. Viewers hide number 0 and mix up threads of different processes that share one.
struct Threads {
    numbers: BTreeMap<(Rank, Role), usize>,
}

impl Threads {
    /// Above every process number: [`crate::topology::MAX_RANKS`] is less.
    const FIRST: usize = 1 << 20;

    fn of(records: &[Record]) -> Self {
        let mut numbers: BTreeMap<_, _> = records.iter().map(|record| ((record.rank, record.role), 0)).collect();
        numbers.values_mut().zip(Self::FIRST..).for_each(|(number, next)| *number = next);
        Self { numbers }
    }

    /// The `pid` and `tid` of a record.
    fn place(&self, record: &Record) -> String {
        let tid = self.numbers.get(&(record.rank, record.role)).copied().unwrap_or_default();
        format!("\"pid\":{},\"tid\":{tid}", record.rank.0 + 1)
    }

    /// Names processes and threads.
    fn announce(&self, events: &mut Events<'_, impl Write>) -> fmt::Result {
        let mut named = None;
        for (&(rank, role), tid) in &self.numbers {
            let pid = rank.0 + 1;
            if named.replace(rank) != Some(rank) {
                events.event(format_args!(
                    "\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{pid},\"args\":{{\"name\":\"rank {rank}\"}}"
                ))?;
            }
            events.event(format_args!(
                "\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{pid},\"tid\":{tid},\"args\":{{\"name\":\"{role}\"}}"
            ))?;
        }
        Ok(())
    }
}

/// Every publish, by the reader's rank and the cell, in the order of the records.
struct Publishes<'a> {
    of_cell: BTreeMap<(Rank, Cell), Vec<(u64, &'a Record)>>,
}

impl<'a> Publishes<'a> {
    fn of(records: &'a [Record]) -> Self {
        let mut of_cell = BTreeMap::<_, Vec<_>>::new();
        for record in records {
            if let Verb::Publish { lane, cell, value } = record.verb {
                of_cell.entry((lane.peer, cell)).or_default().push((value, record));
            }
        }
        Self { of_cell }
    }

    /// The publish that met the need of `wait`: going back from its end, the first that was enough. Counts start anew in
    /// a new generation, so that the first of all may be too old.
    fn ending(&self, wait: &Wait<'_>, end: Nanos) -> Option<&'a Record> {
        let published = self.of_cell.get(&(wait.record.rank, wait.cell))?;
        let known = published.partition_point(|(_, record)| record.at <= end);
        let enough = published[..known].iter().rev().take_while(|(value, _)| *value >= wait.at_least);
        enough.last().map(|(_, record)| *record)
    }
}

/// A wait that began.
struct Wait<'a> {
    record: &'a Record,
    cell: Cell,
    at_least: u64,
}

impl Wait<'_> {
    /// Draws it as a bar; `woke` is none when it never ended.
    fn draw(
        &self,
        events: &mut Events<'_, impl Write>,
        threads: &Threads,
        end: Nanos,
        woke: Option<Option<usize>>,
    ) -> fmt::Result {
        let Self { record, cell, at_least } = self;
        let outcome = match woke {
            Some(Some(index)) => format!("need {index} met"),
            Some(None) => String::from("failed"),
            None => String::from("never ended"),
        };
        events.slice(
            format_args!("wait {}", counter_name(cell.counter)),
            threads.place(record),
            record,
            end - record.at,
            format_args!("\"cell\":\"{}\",\"at least\":{at_least},\"outcome\":\"{outcome}\"", CellName(*cell)),
        )
    }
}

fn draw_verb(events: &mut Events<'_, impl Write>, threads: &Threads, record: &Record) -> fmt::Result {
    let (place, brief) = (threads.place(record), Nanos(1));
    match record.verb {
        Verb::Put { lane, to, len } => events.slice(
            format_args!("put"),
            place,
            record,
            brief,
            format_args!("\"lane\":\"{lane}\",\"to\":{to},\"bytes\":{len}"),
        ),
        Verb::Get { lane, from, len } => events.slice(
            format_args!("get"),
            place,
            record,
            brief,
            format_args!("\"lane\":\"{lane}\",\"from\":{from},\"bytes\":{len}"),
        ),
        Verb::Publish { lane, cell, value } => events.slice(
            format_args!("publish {}", counter_name(cell.counter)),
            place,
            record,
            brief,
            format_args!("\"lane\":\"{lane}\",\"cell\":\"{}\",\"value\":{value}", CellName(cell)),
        ),
        Verb::Units { lane, len, waited } => events.slice(
            format_args!("wait units"),
            place,
            &Record { at: record.at - waited, ..*record },
            waited,
            format_args!("\"lane\":\"{lane}\",\"bytes\":{len}"),
        ),
        Verb::Flushed { lane } => {
            events.slice(format_args!("flush"), place, record, brief, format_args!("\"lane\":\"{lane}\""))
        }
        Verb::Open => events.instant("open", place, record),
        Verb::Close => events.instant("close", place, record),
        Verb::Wait { .. } | Verb::Woke { .. } => Ok(()),
    }
}

/// The list of events as it is written. All strings are made of letters, digits and blanks here and need no escapes.
struct Events<'a, W: Write> {
    out: &'a mut W,
    first: bool,
    arrows: u64,
}

impl<W: Write> Events<'_, W> {
    fn event(&mut self, fields: fmt::Arguments<'_>) -> fmt::Result {
        let comma = if std::mem::take(&mut self.first) { "" } else { "," };
        write!(self.out, "{comma}\n{{{fields}}}")
    }

    fn slice(
        &mut self,
        name: fmt::Arguments<'_>,
        place: String,
        record: &Record,
        duration: Nanos,
        args: fmt::Arguments<'_>,
    ) -> fmt::Result {
        let (at, duration, op) = (Micros(record.at), Micros(duration), record.op);
        self.event(format_args!(
            "\"ph\":\"X\",\"name\":\"{name}\",{place},\"ts\":{at},\"dur\":{duration},\"args\":{{\"op\":{op},{args}}}"
        ))
    }

    fn instant(&mut self, name: &str, place: String, record: &Record) -> fmt::Result {
        let (at, op) = (Micros(record.at), record.op);
        self.event(format_args!(
            "\"ph\":\"i\",\"s\":\"t\",\"name\":\"{name}\",{place},\"ts\":{at},\"args\":{{\"op\":{op}}}"
        ))
    }

    /// An arrow from `publish` to the end of `wait`. Viewers tie its ends to the slices around them, so the head lies
    /// one nanosecond before the wait's end, and never before the wait's beginning.
    fn arrow(&mut self, threads: &Threads, publish: &Record, wait: &Record, end: Nanos) -> fmt::Result {
        self.arrows += 1;
        let (id, from, to) = (self.arrows, threads.place(publish), threads.place(wait));
        let (start, head) = (Micros(publish.at), Micros((end - Nanos(1)).max(wait.at)));
        let name = "\"cat\":\"publish\",\"name\":\"ends\"";
        self.event(format_args!("\"ph\":\"s\",\"id\":{id},{name},{from},\"ts\":{start}"))?;
        self.event(format_args!("\"ph\":\"f\",\"bp\":\"e\",\"id\":{id},{name},{to},\"ts\":{head}"))
    }
}

/// Nanoseconds as microseconds with three decimals, exactly.
struct Micros(Nanos);

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0.0 / 1000, self.0.0 % 1000)
    }
}

struct CellName(Cell);

impl fmt::Display for CellName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cell { writer, lane, counter } = self.0;
        write!(f, "{} on {}", counter_name(counter), LaneId { peer: writer, kind: lane })
    }
}

const fn counter_name(counter: Counter) -> &'static str {
    match counter {
        Counter::Alarm => "alarm",
        Counter::Opening => "opening",
        Counter::Waiting => "waiting",
        Counter::Counts => "counts",
        Counter::Note => "note",
        Counter::Done => "done",
        Counter::Tail => "tail",
        Counter::Placed => "placed",
        Counter::Head => "head",
        Counter::Even => "arrivals of even operations",
        Counter::Odd => "arrivals of odd operations",
        Counter::Received => "received",
        Counter::Probe => "probe",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::port::{Duty, LaneKind};

    const TAIL: Cell = Cell::new(Rank(0), LaneKind::Data(0), Counter::Tail);

    fn record(at: u64, rank: u32, duty: Duty, verb: Verb) -> Record {
        Record { at: Nanos(at), rank: Rank(rank), role: Role::serving(duty, Rank(1 - rank), 0), op: 7, verb }
    }

    fn lane(peer: u32) -> LaneId {
        LaneId { peer: Rank(peer), kind: LaneKind::Data(0) }
    }

    /// Rank 0 sends 64 bytes and a tail to rank 1, which waits for a second tail in vain.
    fn records() -> Vec<Record> {
        let publish = |value| Verb::Publish { lane: lane(1), cell: TAIL, value };
        vec![
            record(0, 0, Duty::Sender, Verb::Open),
            record(5, 1, Duty::Receiver, Verb::Open),
            record(10, 1, Duty::Receiver, Verb::Wait { cell: TAIL, at_least: 2 }),
            record(1_001, 0, Duty::Sender, Verb::Put { lane: lane(1), to: 4096, len: 64 }),
            record(1_500, 0, Duty::Sender, publish(1)),
            record(2_000, 0, Duty::Sender, publish(2)),
            record(2_500, 0, Duty::Sender, publish(3)),
            record(2_600, 0, Duty::Sender, Verb::Flushed { lane: lane(1) }),
            record(3_250, 1, Duty::Receiver, Verb::Woke { index: Some(0) }),
            record(3_300, 0, Duty::Sender, Verb::Close),
            record(4_000, 1, Duty::Receiver, Verb::Wait { cell: TAIL, at_least: 4 }),
            record(5_000, 1, Duty::Receiver, Verb::Woke { index: None }),
            record(5_500, 1, Duty::Receiver, Verb::Wait { cell: TAIL, at_least: 5 }),
            record(6_000, 0, Duty::Control, Verb::Get { lane: lane(1), from: 128, len: 32 }),
        ]
    }

    fn events(records: &[Record]) -> Vec<Value> {
        let mut text = String::new();
        perfetto(records, &mut text).expect("writing to a string cannot fail");
        let trace: Value = serde_json::from_str(&text).expect("valid JSON");
        trace["traceEvents"].as_array().expect("a list of events").clone()
    }

    fn of_phase<'a>(events: &'a [Value], phase: &str) -> Vec<&'a Value> {
        events.iter().filter(|event| event["ph"] == phase).collect()
    }

    #[test]
    fn ranks_are_processes_and_roles_are_threads_with_numbers_of_their_own() {
        let events = events(&records());
        let names: Vec<_> = of_phase(&events, "M").iter().map(|event| event["args"]["name"].clone()).collect();
        let expected = ["rank 0", "control of rank 1, track 0", "sender of rank 1, track 0", "rank 1"];
        assert_eq!(names[..4], expected.map(Value::from));
        let threads = of_phase(&events, "M").into_iter().filter_map(|event| event.get("tid")).collect::<Vec<_>>();
        assert_eq!(threads.len(), 3);
        assert!(threads.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn waits_are_bars_with_their_outcome() {
        let events = events(&records());
        let waits: Vec<_> = of_phase(&events, "X").into_iter().filter(|event| event["name"] == "wait tail").collect();
        let drawn: Vec<_> = waits.iter().map(|event| json!([event["ts"], event["dur"]])).collect();
        assert_eq!(drawn, [json!([0.01, 3.24]), json!([4.0, 1.0]), json!([5.5, 0.5])]);
        let outcomes: Vec<_> = waits.iter().map(|event| event["args"]["outcome"].clone()).collect();
        assert_eq!(outcomes, ["need 0 met", "failed", "never ended"]);
        let cell = "tail on data lane 0 of rank 0";
        let args = json!({"op": 7, "cell": cell, "at least": 2, "outcome": "need 0 met"});
        assert_eq!(waits[0]["args"], args);
    }

    #[test]
    fn verbs_carry_their_arguments() {
        let events = events(&records());
        let args = |name: &str| events.iter().find(|event| event["name"] == name).expect(name)["args"].clone();
        let lane = "data lane 0 of rank 1";
        assert_eq!(args("put"), json!({"op": 7, "lane": lane, "to": 4096, "bytes": 64}));
        assert_eq!(args("get"), json!({"op": 7, "lane": lane, "from": 128, "bytes": 32}));
        let cell = "tail on data lane 0 of rank 0";
        assert_eq!(args("publish tail"), json!({"op": 7, "lane": lane, "cell": cell, "value": 1}));
        assert_eq!(args("flush"), json!({"op": 7, "lane": lane}));
        assert_eq!(of_phase(&events, "i").len(), 3, "two opened, one closed");
    }

    #[test]
    fn an_arrow_leads_from_the_publish_that_was_enough_to_the_wait() {
        let events = events(&records());
        let (starts, heads) = (of_phase(&events, "s"), of_phase(&events, "f"));
        assert_eq!((starts.len(), heads.len()), (1, 1), "failed and endless waits have none");
        assert_eq!((&starts[0]["ts"], &starts[0]["pid"]), (&json!(2.0), &json!(1)), "the publish of 2, not of 3");
        assert_eq!((&heads[0]["ts"], &heads[0]["pid"]), (&json!(3.249), &json!(2)));
        assert_eq!(starts[0]["id"], heads[0]["id"]);
    }

    #[test]
    fn no_records_make_an_empty_trace() {
        assert_eq!(events(&[]), Vec::<Value>::new());
    }
}
