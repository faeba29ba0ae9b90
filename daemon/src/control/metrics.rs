//! Prometheus metrics over HTTP: one GET per connection, bounded, inside control's event loop.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use nightporter_core::counters::VmCounters;
use nightporter_core::drops::DropReason;
use nightporter_core::time::{Duration, Instant};
use nix::sys::epoll::{Epoll, EpollEvent};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::conn::{ACCEPTS_PER_TURN, Allowance, Clients, Conn, accepted};
use crate::log::Limit;
use crate::token::Token;
use crate::vhost::listener::somebody_waits;
use nightporter_api::{PortStatus, Status, VmStatus};

/// Scrapes within this time get the same answer: everybody on the host may ask, and an answer
/// takes a walk over all flows.
const RENDER_INTERVAL: Duration = Duration::from_millis(500);
/// Connections at a time. Everybody on the host may open some and say nothing, and the idlest makes
/// room for a new one: with so many places a scrape that is sent within milliseconds is there
/// before it has to.
const SCRAPERS_MAX: usize = 256;
/// Bytes of an HTTP request's head at most.
const REQUEST_BYTES_MAX: usize = 8192;

/// The listener and its clients.
#[derive(Debug)]
pub(crate) struct MetricsServer {
    listener: TcpListener,
    clients: Clients<Conn<TcpStream>>,
    /// The last answer to a scrape, and when it was made.
    rendered: Option<(Instant, Arc<Vec<u8>>)>,
    /// Places of clients whose scrape waits for a status.
    waiting: Vec<u16>,
    log: Limit,
}

impl MetricsServer {
    pub(crate) fn new(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            clients: Clients::for_at_most(SCRAPERS_MAX),
            rendered: None,
            waiting: Vec::new(),
            log: Limit::new(),
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    #[cfg(test)]
    pub(crate) fn address(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    /// Accepts waiting clients, whose requests may be there already. Errors: a client still waits,
    /// and cannot be accepted.
    pub(crate) fn handle_listener(
        &mut self,
        epoll: &Epoll,
        all: &mut Allowance,
        now: Instant,
    ) -> io::Result<()> {
        for _ in 0..ACCEPTS_PER_TURN {
            let accepted = accepted(self.listener.accept().map(|(stream, _)| stream));
            let stream = match accepted {
                Ok(Some(stream)) => stream,
                Ok(None) => return Ok(()),
                Err(_) if !somebody_waits(&self.listener) => return Ok(()),
                Err(error) => {
                    if self.log.allows() {
                        tracing::warn!(%error, "metrics: takes no connections for a second");
                    }
                    return Err(error);
                }
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            // Whoever has asked waits for the next answer, which is there soon.
            let has_asked = |place| self.waiting.contains(&place);
            let conn = Conn::new(stream, REQUEST_BYTES_MAX);
            let place = self.clients.insert_beside(conn, has_asked);
            self.waiting.retain(|waits| *waits != place);
            let added = self.clients.at(place).map(|conn| {
                let event = EpollEvent::new(conn.interest(), Token::Metrics(place).pack());
                epoll.add(conn.fd(), event)
            });
            if added == Some(Ok(())) {
                self.handle_client(epoll, all, now, place);
            } else {
                self.clients.remove(place);
            }
        }
        Ok(())
    }

    /// Some scrape waits for [`Self::handle_answer`].
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Something happened on the connection at `place`; a complete request gets the last answer, or
    /// waits for the next.
    pub(crate) fn handle_client(
        &mut self,
        epoll: &Epoll,
        all: &mut Allowance,
        now: Instant,
        place: u16,
    ) {
        let Self { clients, rendered, waiting, .. } = self;
        let Some(conn) = clients.at(place) else { return };
        let mut alive = conn.fill().is_ok();
        if let Some(head) = conn.take_until(b"\r\n\r\n") {
            let fresh = |r: &&(Instant, _)| now.since(r.0) < RENDER_INTERVAL;
            match (is_metrics_request(&head), rendered.as_ref().filter(fresh)) {
                (Err(refusal), _) => end_with(conn, Arc::new(refusal)),
                (Ok(()), Some((_, answer))) => end_with(conn, Arc::clone(answer)),
                (Ok(()), None) => waiting.push(place),
            }
        } else if conn.is_overfull() {
            let refusal = response("431 Request Header Fields Too Large", "text/plain", "");
            end_with(conn, Arc::new(refusal));
        }
        let waits = waiting.contains(&place);
        alive = alive && conn.flush(all).is_ok() && (waits || !conn.is_done());
        self.finish(epoll, place, alive);
    }

    /// Answers the clients that wait for it.
    pub(super) fn handle_answer(
        &mut self,
        epoll: &Epoll,
        all: &mut Allowance,
        now: Instant,
        answer: Arc<Vec<u8>>,
    ) {
        self.answer_all(epoll, all, &answer);
        self.rendered = Some((now, answer));
    }

    /// There is none for them.
    pub(super) fn handle_failure(&mut self, epoll: &Epoll, all: &mut Allowance) {
        let answer = response("500 Internal Server Error", "text/plain", "see the log\n");
        self.answer_all(epoll, all, &Arc::new(answer));
    }

    fn answer_all(&mut self, epoll: &Epoll, all: &mut Allowance, answer: &Arc<Vec<u8>>) {
        for place in std::mem::take(&mut self.waiting) {
            let Some(conn) = self.clients.at(place) else { continue };
            end_with(conn, Arc::clone(answer));
            let alive = conn.flush(all).is_ok() && !conn.is_done();
            self.finish(epoll, place, alive);
        }
    }

    /// Waits for the next input on the connection at `place`, or forgets it.
    fn finish(&mut self, epoll: &Epoll, place: u16, mut alive: bool) {
        let Some(conn) = self.clients.at(place) else { return };
        if alive {
            let mut event = EpollEvent::new(conn.interest(), Token::Metrics(place).pack());
            alive = epoll.modify(conn.fd(), &mut event).is_ok();
        }
        if !alive {
            self.waiting.retain(|waits| *waits != place);
            self.clients.remove(place);
        }
    }
}

/// Whether a request's head asks for the metrics.
///
/// # Errors
/// It does not: the response to it.
pub fn is_metrics_request(head: &[u8]) -> Result<(), Vec<u8>> {
    let line = head.split(|&b| b == b'\r').next().unwrap_or_default();
    let mut words = line.split(|&b| b == b' ');
    match (words.next(), words.next()) {
        (Some(b"GET"), Some(b"/metrics")) => Ok(()),
        (Some(b"GET"), _) => Err(response("404 Not Found", "text/plain", "see /metrics\n")),
        _ => Err(response("405 Method Not Allowed", "text/plain", "GET /metrics\n")),
    }
}

/// The last output on a connection.
fn end_with(conn: &mut Conn<TcpStream>, answer: Arc<Vec<u8>>) {
    conn.queue_shared(answer);
    conn.close_when_flushed();
}

/// The answer to a scrape.
pub(super) fn scrape(status: &Status) -> Vec<u8> {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    response("200 OK", kind, &render(status.clone()))
}

fn response(status: &str, kind: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

/// All metrics in the OpenMetrics text format.
fn render(status: Status) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Snapshot(status)));
    let mut text = String::new();
    encode(&mut text, &registry).expect("a String takes everything");
    text
}

/// One moment's numbers.
#[derive(Debug)]
struct Snapshot(Status);

/// Labels of one value.
type Labels<'a> = Vec<(&'static str, &'a str)>;

impl Snapshot {
    /// Writes one family with a value per port, or several.
    fn family<'a, M: EncodeMetric>(
        &'a self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, help, kind): (&str, &str, MetricType),
        values: impl Fn(&'a PortStatus) -> Vec<(Labels<'a>, M)>,
    ) -> fmt::Result {
        let mut family = encoder.encode_descriptor(name, help, None, kind)?;
        for port in &self.0.ports {
            for (mut labels, value) in values(port) {
                labels.insert(0, ("port", &port.name));
                value.encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        use MetricType::{Counter, Gauge};
        let both = |from: u64, to: u64| {
            vec![
                (vec![("direction", "from_port")], ConstCounter::new(from)),
                (vec![("direction", "to_port")], ConstCounter::new(to)),
            ]
        };
        let one = |n: u64| vec![(vec![], gauge(n))];
        let e = &mut encoder;
        let frames = "Frames that entered or left the switch; a super-segment is one";
        self.family(e, ("nightporter_frames", frames, Counter), |p| {
            both(p.frames_from_port, p.frames_to_port)
        })?;
        let bytes = "Bytes of those frames, from the Ethernet header on";
        self.family(e, ("nightporter_bytes", bytes, Counter), |p| {
            both(p.bytes_from_port, p.bytes_to_port)
        })?;
        let drops = "Frames dropped, by reason";
        self.family(e, ("nightporter_drops", drops, Counter), |p| {
            let value = |reason: &DropReason| {
                let n = p.drops.get(reason.label()).copied().unwrap_or(0);
                (vec![("reason", reason.label())], ConstCounter::new(n))
            };
            DropReason::ALL.iter().map(value).collect()
        })?;
        let link = "Whether frames can pass";
        self.family(e, ("nightporter_link_up", link, Gauge), |p| one(p.link.into()))?;
        let backlog = "Bytes that wait for a guest to post receive buffers";
        self.family(e, ("nightporter_backlog_bytes", backlog, Gauge), |p| one(p.backlog_bytes))?;
        self.encode_vms(e)?;
        let lost = "Log lines that were not written";
        let lost = e.encode_descriptor("nightporter_log_lines_lost", lost, None, Counter)?;
        ConstCounter::new(self.0.log_lines_lost).encode(lost)?;
        let stalls = "Turns of the worker that took longer than a second";
        let stalls = e.encode_descriptor("nightporter_stalls", stalls, None, Counter)?;
        ConstCounter::new(self.0.stalls).encode(stalls)?;
        let refused = "System calls that were refused, because the daemon makes none of them";
        let refused = e.encode_descriptor("nightporter_refused_calls", refused, None, Counter)?;
        ConstCounter::new(self.0.refused_calls).encode(refused)?;
        let broker = "Whether the process that opens uplinks runs";
        let broker = e.encode_descriptor("nightporter_broker_up", broker, None, Gauge)?;
        gauge((!self.0.broker_ended).into()).encode(broker)?;
        self.encode_registry(e)?;
        let mut uptime =
            e.encode_descriptor("nightporter_uptime_seconds", "Since the start", None, Gauge)?;
        let uptime_s = i64::try_from(self.0.uptime_s).unwrap_or(i64::MAX);
        uptime.encode_gauge(&uptime_s)
    }
}

impl Snapshot {
    fn encode_registry(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        use MetricType::{Counter, Gauge};
        let registry = &self.0.registry;
        let up = "Whether the registry answers";
        let up = e.encode_descriptor("nightporter_registry_up", up, None, Gauge)?;
        gauge(registry.trouble.is_none().into()).encode(up)?;
        let lost = "Times that the registry stopped answering";
        let lost = e.encode_descriptor("nightporter_registry_lost", lost, None, Counter)?;
        ConstCounter::new(registry.lost).encode(lost)?;
        let known = "Entries of other hosts in the registry, by kind";
        let mut known = e.encode_descriptor("nightporter_registry_known", known, None, Gauge)?;
        for (kind, n) in [
            ("hosts", registry.hosts),
            ("stations", registry.stations),
            ("left_out", registry.left_out),
        ] {
            gauge(n).encode(known.encode_family(&[("kind", kind)])?)?;
        }
        let listeners = "Changes of the ports at which guests listen by the virtual TOE, and \
                         claims that were handed to the registry's thread again for them; of \
                         several for one VM it may write the last alone";
        let name = "nightporter_registry_listeners";
        let mut listeners = e.encode_descriptor(name, listeners, None, Counter)?;
        for (kind, n) in
            [("changes", registry.listener_changes), ("writes", registry.listener_writes)]
        {
            ConstCounter::new(n).encode(listeners.encode_family(&[("kind", kind)])?)?;
        }
        let claims = "VMs of this host, by the state of their claims";
        let mut claims = e.encode_descriptor("nightporter_registry_claims", claims, None, Gauge)?;
        for state in ["held", "unlisted", "waiting", "refused", "contested"] {
            let n = registry.claims.get(state).copied().unwrap_or(0);
            gauge(n).encode(claims.encode_family(&[("state", state)])?)?;
        }
        Ok(())
    }

    /// As [`Self::family`], for ports with a VM.
    fn vm_family<'a, M: EncodeMetric>(
        &'a self,
        encoder: &mut DescriptorEncoder<'_>,
        family: (&str, &str, MetricType),
        values: impl Fn(&'a VmStatus) -> Vec<(Labels<'a>, M)>,
    ) -> fmt::Result {
        self.family(encoder, family, |p| p.vm.as_ref().map_or_else(Vec::new, &values))
    }

    fn encode_vms(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        use MetricType::{Counter, Gauge};
        let flows = "Tracked TCP connections, by state";
        self.vm_family(e, ("nightporter_flows", flows, Gauge), |vm| {
            vm.flows.iter().map(|(s, n)| (vec![("state", s.as_str())], gauge(*n))).collect()
        })?;
        let store = "Bytes of the VM's store: acknowledged and not yet taken by the guest (held), \
                     set aside for promises (promised), allowed (budget)";
        self.vm_family(e, ("nightporter_store_bytes", store, Gauge), |vm| {
            vec![
                (vec![("kind", "held")], gauge(vm.held_bytes)),
                (vec![("kind", "promised")], gauge(vm.promised_bytes)),
                (vec![("kind", "budget")], gauge(vm.budget_bytes)),
            ]
        })?;
        let offload = "Whether ack offload is on for new connections";
        self.vm_family(e, ("nightporter_offload", offload, Gauge), |vm| {
            vec![(vec![], gauge(u64::from(vm.offload && !vm.draining)))]
        })?;
        let congestion = "Whether the host controls congestion for the guest";
        self.vm_family(e, ("nightporter_congestion_offload", congestion, Gauge), |vm| {
            vec![(vec![], gauge(u64::from(vm.controls_congestion)))]
        })?;
        let rings = "Queues put out of use because the guest broke the rules; the link went down";
        self.vm_family(e, ("nightporter_ring_faults", rings, Counter), |vm| {
            vec![(vec![], ConstCounter::new(vm.ring_faults))]
        })?;
        let faults = "Times that a page of the VMM's shared memory was missing; the port went down";
        self.vm_family(e, ("nightporter_memory_faults", faults, Counter), |vm| {
            vec![(vec![], ConstCounter::new(vm.memory_faults))]
        })?;
        let blocked =
            "Times that a descriptor of the VMM kept the daemon waiting; the port went down";
        self.vm_family(e, ("nightporter_blocked", blocked, Counter), |vm| {
            vec![(vec![], ConstCounter::new(vm.blocked))]
        })?;
        self.encode_boosts(e)?;
        for counter in VmCounters::ALL {
            let name = format!("nightporter_{}", counter.metric);
            self.vm_family(e, (&name, counter.help(), Counter), |vm| {
                let n = vm.counters.get(counter.name).copied().unwrap_or(0);
                vec![(vec![], ConstCounter::new(n))]
            })?;
        }
        Ok(())
    }
}

impl Snapshot {
    /// The accounts of VMs that have boost.
    fn encode_boosts(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        use MetricType::{Counter, Gauge};
        let refused = "Whether the VM has boost and is not boosted; nightporter status says why";
        self.vm_family(e, ("nightporter_boost_refused", refused, Gauge), |vm| {
            let boost = vm.boost.iter();
            boost.map(|it| (vec![], gauge((!it.refused.is_empty()).into()))).collect()
        })?;
        let unpaid = "Favoured CPU time that is not paid back, in microseconds";
        self.vm_family(e, ("nightporter_boost_unpaid_us", unpaid, Gauge), |vm| {
            vm.boost.iter().map(|it| (vec![], gauge(it.unpaid_us))).collect()
        })?;
        let favoured = "CPU time for which the VM was favoured, in microseconds";
        self.vm_family(e, ("nightporter_boost_favoured_us", favoured, Counter), |vm| {
            vm.boost.iter().map(|it| (vec![], ConstCounter::new(it.favoured_us))).collect()
        })?;
        let boosts = "Boosts that began";
        self.vm_family(e, ("nightporter_boosts", boosts, Counter), |vm| {
            vm.boost.iter().map(|it| (vec![], ConstCounter::new(it.boosts))).collect()
        })?;
        let ends = "Boosts that ended early, or did not begin, by reason";
        self.vm_family(e, ("nightporter_boost_limits", ends, Counter), |vm| {
            let of = |it: &'_ nightporter_api::BoostAccount| {
                [
                    ("time", it.ended_by_time),
                    ("budget", it.ended_by_budget),
                    ("sleep", it.ended_by_sleep),
                    ("neighbours", it.waits),
                    ("empty", it.empty),
                    ("rest", it.rests),
                ]
            };
            let all = vm.boost.iter().flat_map(of);
            all.map(|(reason, n)| (vec![("reason", reason)], ConstCounter::new(n))).collect()
        })
    }
}

fn gauge(n: u64) -> ConstGauge<i64> {
    ConstGauge::new(i64::try_from(n).unwrap_or(i64::MAX))
}
