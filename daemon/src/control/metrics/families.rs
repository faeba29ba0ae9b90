//! The metrics: every family, its help and its labels, made of a status. docs/metrics.md is made
//! of them.

use std::fmt;

use nightporter_api::{BoostAccount, Histogram, PortStatus, Status, VmStatus};
use nightporter_core::counters::VmCounters;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::watched::Watched;

/// All metrics in the OpenMetrics text format.
pub(super) fn render(status: Status) -> String {
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
            for (more, value) in values(port) {
                let labels = [vec![("port", port.name.as_str())], more].concat();
                value.encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    /// The same for families that VMs, uplinks and overlays have alike, with their kind.
    fn port_family<'a, M: EncodeMetric>(
        &'a self,
        encoder: &mut DescriptorEncoder<'_>,
        family: (&str, &str, MetricType),
        values: impl Fn(&'a PortStatus) -> Vec<(Labels<'a>, M)>,
    ) -> fmt::Result {
        self.family(encoder, family, |port| {
            let kind = |(more, value): (Labels<'a>, M)| {
                ([vec![("kind", port.kind.as_str())], more].concat(), value)
            };
            values(port).into_iter().map(kind).collect()
        })
    }

    /// Writes one family with one value, of the daemon.
    fn single(
        encoder: &mut DescriptorEncoder<'_>,
        (name, help, kind): (&str, &str, MetricType),
        value: &impl EncodeMetric,
    ) -> fmt::Result {
        value.encode(encoder.encode_descriptor(name, help, None, kind)?)
    }

    /// Writes one family with a value for each worker: frames, sockets.
    fn worker_family(
        encoder: &mut DescriptorEncoder<'_>,
        (name, help, kind): (&str, &str, MetricType),
        values: [impl EncodeMetric; 2],
    ) -> fmt::Result {
        let mut family = encoder.encode_descriptor(name, help, None, kind)?;
        for (worker, value) in Watched::ALL.into_iter().zip(values) {
            value.encode(family.encode_family(&[("worker", worker.name())])?)?;
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
        self.port_family(e, ("nightporter_frames", frames, Counter), |p| {
            both(p.frames_from_port, p.frames_to_port)
        })?;
        let bytes = "Bytes of those frames, from the Ethernet header on";
        self.port_family(e, ("nightporter_bytes", bytes, Counter), |p| {
            both(p.bytes_from_port, p.bytes_to_port)
        })?;
        let drops = "Frames dropped, by reason; a reason appears when it has dropped one";
        self.port_family(e, ("nightporter_drops", drops, Counter), |p| {
            let all = p.drops.iter();
            all.map(|(why, n)| (vec![("reason", why.as_str())], ConstCounter::new(*n))).collect()
        })?;
        let link = "Whether frames can pass";
        self.port_family(e, ("nightporter_link_up", link, Gauge), |p| one(p.link.into()))?;
        let backlog = "Bytes that wait for a guest to post receive buffers";
        self.port_family(e, ("nightporter_backlog_bytes", backlog, Gauge), |p| {
            one(p.backlog_bytes)
        })?;
        self.encode_vms(e)?;
        self.encode_registry(e)?;
        self.encode_daemon(e)
    }
}

impl Snapshot {
    /// The numbers of the daemon as a whole.
    fn encode_daemon(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        use MetricType::{Counter, Gauge};
        let status = &self.0;
        let count = |n: u64| ConstCounter::new(n);
        let build = "Always 1; the label is the version of the daemon";
        let build = e.encode_descriptor("nightporter_build_info", build, None, Gauge);
        gauge(1).encode(build?.encode_family(&[("version", status.version.as_str())])?)?;
        let cpu = "CPU time of the thread that forwards all frames (frames), and of that which has \
                   all sockets of virtual TOE (sockets); with busy_poll it counts the polling too";
        let cpu = ("nightporter_worker_cpu_seconds", cpu, Counter);
        let [of_frames, of_sockets] = [status.worker_cpu_us, status.sockets.cpu_us].map(seconds);
        Self::worker_family(e, cpu, [of_frames, of_sockets])?;
        let lost = "Log lines that were not written";
        let lost = ("nightporter_log_lines_lost", lost, Counter);
        Self::single(e, lost, &count(status.log_lines_lost))?;
        let stalls = "Turns of the thread that took longer than a second: frames of all VMs \
                      stood, or the sockets of all by virtual TOE";
        let stalls = ("nightporter_stalls", stalls, Counter);
        Self::worker_family(e, stalls, [count(status.stalls), count(status.sockets.stalls)])?;
        let refused = "System calls that were refused, because the daemon makes none of them";
        let refused = ("nightporter_refused_calls", refused, Counter);
        Self::single(e, refused, &count(status.refused_calls))?;
        let broker = "Whether the process that opens uplinks runs";
        let broker = ("nightporter_broker_up", broker, Gauge);
        Self::single(e, broker, &gauge((!status.broker_ended).into()))?;
        let uptime = ("nightporter_uptime_seconds", "Since the start", Gauge);
        Self::single(e, uptime, &gauge(status.uptime_s))
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
        let accept = "Whether the host answers SYNs for the guest: accept offload is on, and has \
                      begun";
        self.vm_family(e, ("nightporter_accept_offload", accept, Gauge), |vm| {
            vec![(vec![], gauge(u64::from(vm.accepts_in_s == Some(0))))]
        })?;
        let translated =
            "Connections that the host has accepted and translates: a stop resets them";
        self.vm_family(e, ("nightporter_translated_flows", translated, Gauge), |vm| {
            vec![(vec![], gauge(vm.translated_flows))]
        })?;
        let rings =
            "Queues put out of use because the driver broke virtio's rules; the link went down";
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
        self.encode_attached(e)?;
        self.encode_boosts(e)?;
        self.encode_saved(e)?;
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
    /// The taps of VMs that are attached.
    fn encode_attached(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        use MetricType::{Counter, Gauge};
        let both = |from: u64, to: u64| {
            vec![
                (vec![("direction", "from_port")], ConstCounter::new(from)),
                (vec![("direction", "to_port")], ConstCounter::new(to)),
            ]
        };
        let plain = "Frames of an attached tap that passed the daemon by, because it was away";
        self.vm_family(e, ("nightporter_tap_plain_frames", plain, Counter), |vm| {
            vm.attached.map_or_else(Vec::new, |it| both(it.plain_from_vm, it.plain_to_vm))
        })?;
        let lost = "Frames of an attached tap that were lost, because the daemon did not take \
                    them in time";
        self.vm_family(e, ("nightporter_tap_lost_frames", lost, Counter), |vm| {
            vm.attached.map_or_else(Vec::new, |it| both(it.lost_from_vm, it.lost_to_vm))
        })?;
        let back_offs = "Times that an attached tap was left plain for a while, because the daemon \
                         was away often";
        self.vm_family(e, ("nightporter_tap_back_offs", back_offs, Counter), |vm| {
            vm.attached.iter().map(|it| (vec![], ConstCounter::new(it.back_offs))).collect()
        })?;
        let queue = "Frames in the queue of an attached tap, which its VMM has yet to read";
        self.vm_family(e, ("nightporter_tap_queue_frames", queue, Gauge), |vm| {
            vm.attached.iter().map(|it| (vec![], gauge(it.queue_frames))).collect()
        })
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
        let unpaid = "Favoured CPU time that is not paid back";
        self.vm_family(e, ("nightporter_boost_unpaid_seconds", unpaid, Gauge), |vm| {
            let unpaid = |it: &BoostAccount| ConstGauge::new(as_seconds(it.unpaid_us));
            vm.boost.iter().map(|it| (vec![], unpaid(it))).collect()
        })?;
        let favoured = "CPU time for which the VM was favoured";
        self.vm_family(e, ("nightporter_boost_favoured_seconds", favoured, Counter), |vm| {
            vm.boost.iter().map(|it| (vec![], seconds(it.favoured_us))).collect()
        })?;
        let boosts = "Boosts that began";
        self.vm_family(e, ("nightporter_boosts", boosts, Counter), |vm| {
            vm.boost.iter().map(|it| (vec![], ConstCounter::new(it.boosts))).collect()
        })?;
        let ends = "Boosts that ended early, or did not begin, by reason";
        self.vm_family(e, ("nightporter_boost_limits", ends, Counter), |vm| {
            let of = |it: &'_ BoostAccount| {
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

impl Snapshot {
    /// How far the host is ahead of its guests.
    fn encode_saved(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let acks = "Time between the host's acknowledgement of a byte and the guest's own, a \
                    sample for each acknowledgement of the guest that covers new bytes";
        let acks = ("nightporter_ack_saved_seconds", acks, MetricType::Histogram);
        self.vm_family(e, acks, |vm| vec![(vec![], Saved(&vm.ack_saved))])?;
        let sends = "Time between a send for the guest, which an acknowledgement of a remote \
                     allowed, and the moment in which the guest took that acknowledgement";
        let sends = ("nightporter_send_saved_seconds", sends, MetricType::Histogram);
        self.vm_family(e, sends, |vm| vec![(vec![], Saved(&vm.send_saved))])
    }
}

/// A histogram, in seconds.
struct Saved<'a>(&'a Histogram);

impl EncodeMetric for Saved<'_> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let Histogram { buckets, above, sum_ns } = self.0;
        let buckets = buckets.iter().map(|(ns, n)| (*ns as f64 / 1e9, *n));
        let buckets: Vec<_> = buckets.chain([(f64::INFINITY, *above)]).collect();
        let samples = self.0.samples();
        encoder.encode_histogram::<NoLabelSet>(*sum_ns as f64 / 1e9, samples, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

fn gauge(n: u64) -> ConstGauge<i64> {
    ConstGauge::new(i64::try_from(n).unwrap_or(i64::MAX))
}

fn as_seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

fn seconds(us: u64) -> ConstCounter<f64> {
    ConstCounter::new(as_seconds(us))
}
