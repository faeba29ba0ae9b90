//! Requests and answers of 1 KB on an open connection, in an open loop: a request leaves when it
//! is due, whether or not the one before was answered, and its time counts from then. And what the
//! other guests lose meanwhile, in windows of a second.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nightporter_guest::data::{self, Header, Service, fill, splitmix64};

use super::measures::{ANSWER, LOSS, cell};
use super::rounds::{GOLDEN, Record};
use super::{Lab, NetPath, Options, RECEIVER, TRANSFER_LIMIT, receiver};
use crate::experiment::{Values, shuffled};

/// Bytes of a request, and of its answer.
const BYTES: usize = 1000;
/// One is due in each of these.
const INTERVAL: Duration = Duration::from_millis(50);
/// Requests on one connection: six seconds, of which windows are whole ones.
const VISIT: usize = 120;
/// Neighbours' losses are looked at over so long.
const WINDOW: Duration = Duration::from_secs(1);

impl Lab {
    /// Measures `options.requests` of them over each path of uploads, in turns.
    pub(super) fn ask(&mut self, options: &Options, record: &mut Record<'_>) -> Result<()> {
        let case = record.terms.requests(BYTES);
        let paths = if options.requests > 0 { &*options.paths } else { &[] };
        let cells: Vec<_> = paths.iter().map(|path| cell(case.clone(), *path)).collect();
        record.results.expect(&cells);
        for visit in 0..options.requests.div_ceil(VISIT) {
            for index in shuffled(options.paths.len(), &mut record.random) {
                let (path, cell) = (options.paths[index], &cells[index]);
                if record.results.has(cell, visit * VISIT) {
                    continue; // a run that was cut off had done it
                }
                let text = format!("requests of {BYTES} bytes over {path}");
                record.progress.update(visit * VISIT, options.requests, &text);
                let seed = splitmix64(&mut record.random);
                let (times, losses) = self.ask_once(path, seed)?;
                for (what, list) in [(ANSWER, times), (LOSS, losses)] {
                    let first = record.results.values(&case, path.name(), what).len();
                    for (n, value) in list.into_iter().enumerate() {
                        let of = vec![(what, value)];
                        let values = Values { of, ..Values::default() };
                        record.results.note(cell, first + n, values);
                    }
                }
            }
        }
        Ok(())
    }

    /// One connection. Its requests are spread evenly over the guests' cycle. From when each was
    /// due until its answer was there, ms; and for each window of a second and each other guest,
    /// what it got less of the core than an equal share, in percent of a second.
    fn ask_once(&mut self, path: NetPath, seed: u64) -> Result<(Vec<f64>, Vec<f64>)> {
        self.select(path)?;
        let (world, to) = (&self.world, receiver(path));
        thread::scope(|scope| {
            let asking = scope.spawn(move || world.remote().enter(|| ask(to, VISIT, seed)));
            let mut losses = Vec::new();
            let mut before = self.clock()?;
            while !asking.is_finished() {
                thread::sleep(WINDOW.saturating_sub(before.at.elapsed())); // the window
                let now = self.clock()?;
                let times = before.vcpu.iter().zip(&now.vcpu);
                let times: Vec<f64> =
                    times.map(|(was, is)| is.time.saturating_sub(was.time).as_secs_f64()).collect();
                let fair = times.iter().sum::<f64>() / times.len() as f64;
                let of = |&(guest, time): &(usize, &f64)| {
                    (guest != usize::from(RECEIVER)).then_some(100.0 * (fair - time))
                };
                losses.extend(times.iter().enumerate().filter_map(|it| of(&it)));
                before = now;
            }
            let times = asking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let times = times.with_context(|| format!("requests over {path}"))?;
            Ok((times, losses))
        })
    }
}

/// Sends so many requests to the guest at `address` on one connection of the calling thread's
/// network namespace; the times in milliseconds until their answers were there.
fn ask(address: Ipv4Addr, count: usize, seed: u64) -> Result<Vec<f64>> {
    let total = count * BYTES;
    let mut payload = vec![0; total];
    fill(seed, &mut payload);
    let peer = SocketAddr::from((address, data::PORT));
    let mut stream = TcpStream::connect_timeout(&peer, TRANSFER_LIMIT).context("connecting")?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TRANSFER_LIMIT))?;
    stream.set_write_timeout(Some(TRANSFER_LIMIT))?;
    let header = Header { service: Service::Echo, bytes: total as u64, hash: 0 };
    stream.write_all(&header.to_bytes()).context("sending")?;
    let begin = Instant::now() + INTERVAL;
    // Within its interval each is at another part, so that all of a cycle is met.
    let due = |nth: usize| begin + INTERVAL.mul_f64(nth as f64 + (GOLDEN * nth as f64).fract());
    let mut sender = stream.try_clone()?;
    thread::scope(|scope| {
        let sending = scope.spawn(|| -> Result<()> {
            for (nth, request) in payload.chunks(BYTES).enumerate() {
                thread::sleep(due(nth).saturating_duration_since(Instant::now())); // the point
                sender.write_all(request).context("sending")?;
            }
            Ok(())
        });
        let mut times = Vec::with_capacity(count);
        let mut answer = [0; BYTES];
        for (nth, request) in payload.chunks(BYTES).enumerate() {
            stream.read_exact(&mut answer).context("an answer")?;
            let took = Instant::now().saturating_duration_since(due(nth));
            ensure!(answer == request, "the answer is not what was asked");
            times.push(took.as_secs_f64() * 1e3);
        }
        sending.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        ensure!(stream.read(&mut answer).context("the end")? == 0, "bytes behind the last");
        Ok(times)
    })
}
