//! Our numbers beside the paper's, and the assumptions, as Markdown.

use std::fmt::Write as _;

use super::measure::{Clock, millis, quantile};
use super::scene::{self, Mode};
use super::{Effort, FIGURE_5_BYTES, Panel, Results, VMS_USUAL, mean, median, round_trips};

/// A gigabit per second in MB/s.
const LINK_RATE: f64 = 125.0;

/// The whole file.
#[must_use]
pub fn markdown(effort: &Effort, results: &Results) -> String {
    let mut text = String::from("# The figures of the vSnoop paper in virtual time\n\n");
    text += "Everything here is simulated: the real `core`, machines and a network in virtual \
             time. The\npaper's numbers are of real machines; they are quoted where its text has \
             them.\n\n";
    pings(&mut text, results);
    traces(&mut text, results);
    figure_5(&mut text, results);
    figure_6(&mut text, effort, results);
    sweeps(&mut text, results);
    today(&mut text, effort, results);
    assumptions(&mut text, effort);
    text
}

fn pings(text: &mut String, results: &Results) {
    text.push_str(
        "## Figure 1(a): round trip of a ping to a VM at 60 % load, ms\n\n\
         | VMs | mean | median | 90 % | longest |\n|---:|---:|---:|---:|---:|\n",
    );
    for (vms, pings) in &results.pings {
        let all = round_trips(pings);
        let [median, most, longest] = [0.5, 0.9, 1.0].map(|share| quantile(&all, share));
        let _ = writeln!(
            text,
            "| {vms} | {:.2} | {median:.2} | {most:.2} | {longest:.2} |",
            mean(&all)
        );
    }
    text.push_str(
        "\nPaper (section II): \"as the number of non-idle VMs per core increases, the RTT of the \
         ping\npackets increase almost in proportion to the 30ms VM scheduling slice\".\n\n",
    );
    let Some((_, pings)) = results.pings.iter().find(|(vms, _)| *vms == VMS_USUAL) else { return };
    let share = |f: &dyn Fn(f64) -> bool| {
        let count = pings.iter().filter(|p| f(millis(p.in_guest))).count();
        count as f64 * 100.0 / pings.len().max(1) as f64
    };
    let in_host: Vec<f64> = pings.iter().map(|p| millis(p.in_host)).collect();
    let near = |ms: f64| share(&|wait| (wait - ms).abs() < 1.0);
    let _ = write!(
        text,
        "## Figure 1(b): where a packet to a VM waits, 3 VMs\n\n\
         | | here | paper, section II |\n|---|---:|---|\n\
         | driver domain, 93 % of packets within | {:.3} ms (see below) | 0.45 ms |\n\
         | the VM runs at once | {:.0} % | |\n\
         | it waits 30 ms, within 1 ms | {:.0} % | \"jumps\" at 30 ms intervals |\n\
         | 60 ms | {:.0} % | |\n\
         | 90 ms | {:.0} % | |\n\
         | something else | {:.0} % | |\n\n",
        quantile(&in_host, 0.93),
        near(0.0),
        near(30.0),
        near(60.0),
        near(90.0),
        100.0 - near(0.0) - near(30.0) - near(60.0) - near(90.0),
    );
}

fn traces(text: &mut String, results: &Results) {
    text.push_str(
        "## Figure 2: 1 MB, the run that is the median in time\n\n\
         | | acked, ms after the SYN | delivered |\n|---|---:|---:|\n",
    );
    for trace in &results.traces {
        let [acked, delivered] = trace.took.map(|s| s * 1e3);
        let _ = writeln!(text, "| {} | {acked:.1} | {delivered:.1} |", trace.name);
    }
    text.push_str(
        "\nPaper (section II): \"a much faster transfer to the driver domain than to the guest \
         VM\"; its text\ngives no times.\n\n",
    );
}

fn figure_5(text: &mut String, results: &Results) {
    text.push_str(
        "## Figure 5: 100 KB, 3 VMs at 60 % load, median throughput in MB/s\n\n\
         | | plain | plain, deeper ring | ack offload |\n|---|---:|---:|---:|\n",
    );
    for clock in Clock::ALL {
        let row: Vec<String> = results
            .transfers
            .iter()
            .map(|(_, all)| format!("{:.3}", median(all, FIGURE_5_BYTES, clock)))
            .collect();
        let _ = writeln!(text, "| {} | {} |", clock.name(), row.join(" | "));
    }
    text.push_str("| paper, section V-C | 0.192 | 0.778 | 6.003 |\n");
    let of = |mode: Mode| {
        results.transfers.iter().find(|(m, _)| *m == mode).map_or(&[][..], |(_, all)| all)
    };
    let gain = |clock: Clock| {
        let [without, with] = [Mode::DeepRing, Mode::Offload].map(of);
        median(with, FIGURE_5_BYTES, clock) / median(without, FIGURE_5_BYTES, clock)
    };
    let sooner = |clock: Clock| {
        let [without, with] = [Mode::DeepRing, Mode::Offload]
            .map(|mode| mean(&of(mode).iter().map(|t| millis(t.took(clock))).collect::<Vec<_>>()));
        without / with
    };
    let faster = |mode: Mode| {
        let over = |t: &&super::Transfer| t.throughput(FIGURE_5_BYTES, Clock::InGuest) > LINK_RATE;
        of(mode).iter().filter(over).count() as f64 * 100.0 / of(mode).len().max(1) as f64
    };
    let _ = write!(
        text,
        "\nAck offload to deeper ring: acked {:.1} times, delivered {:.1}, in the guest's eyes \
         {:.1}; paper: 7.7.\nBy the means of the times it is {:.1}, {:.2} and {:.2}; \
         \"Sweeps\" says why.\nFaster than the wire in the guest's eyes: {:.0} % of the transfers \
         with ack offload, {:.0} % without; paper:\n\"about a third\" with vSnoop.\n\n",
        gain(Clock::Acked),
        gain(Clock::Delivered),
        gain(Clock::InGuest),
        sooner(Clock::Acked),
        sooner(Clock::Delivered),
        sooner(Clock::InGuest),
        faster(Mode::Offload),
        faster(Mode::DeepRing),
    );
}

fn figure_6(text: &mut String, effort: &Effort, results: &Results) {
    text.push_str(
        "## Figure 6: medians relative to ack offload, and its own median in MB/s\n\n\
         The paper's text gives no numbers for these panels. It says that vSnoop is never slower, \
         that it\nhelps more with more VMs, more load and smaller transfers, and most with the \
         driver domain on its\nown core up to 1 MB (section V-C).\n\n\
         One cell of \"delivered\" says little: it is sooner in many and later in some (more than \
         1.0 below),\nand the next size may be another matter. \"Sweeps\" says why. With a core \
         of its own for the driver\ndomain (i), or one VM (a), it is sooner in every cell.\n\n",
    );
    for clock in [Clock::Acked, Clock::Delivered] {
        let _ = writeln!(text, "### {}\n", clock.name());
        text.push_str("| panel | |");
        for bytes in effort.sizes {
            let _ = write!(text, " {} |", size(*bytes));
        }
        text.push_str("\n|---|---|");
        text.push_str(&"---:|".repeat(effort.sizes.len()));
        text.push('\n');
        for panel in &results.panels {
            panel_rows(text, panel, clock);
        }
        text.push('\n');
    }
}

fn panel_rows(text: &mut String, panel: &Panel, clock: Clock) {
    for mode in [Mode::Plain, Mode::DeepRing] {
        let _ = write!(text, "| 6({}) {} | {} |", panel.letter, panel.name, mode.name());
        for at in 0..panel.cells.len() {
            let whole = panel.median(at, Mode::Offload, clock);
            let _ = write!(text, " {:.3} |", panel.median(at, mode, clock) / whole);
        }
        text.push('\n');
    }
    let _ = write!(text, "| | {}, MB/s |", Mode::Offload.name());
    for at in 0..panel.cells.len() {
        let _ = write!(text, " {:.2} |", panel.median(at, Mode::Offload, clock));
    }
    text.push('\n');
}

/// Of the sweeps: when all is delivered, and how many runs need no more than the slice under way.
fn sweeps(text: &mut String, results: &Results) {
    let range = |panel: &Panel, which: usize| {
        let gains = (0..panel.cells.len()).map(|at| panel.gains(at, Clock::Delivered)[which]);
        let (least, most) = gains.fold((f64::MAX, 0.0), |(a, b), g| (f64::min(a, g), g.max(b)));
        format!("{least:.2} to {most:.2}")
    };
    let [paper, today] = &results.sweeps;
    let _ = write!(
        text,
        "## Sweeps: delivered after how many ms, by size, 3 VMs at 60 % load\n\n\
         Each turn of a driver domain that shares the core preempts the VM that runs, and Xen \
         queues that\none behind its equals: every turn hands the core on to the next VM. Which \
         one has it when the last\nbytes come is the number of turns since `connect` modulo the \
         VMs with as much credit, and the size\ndecides how many turns there are. The VM that \
         receives has the core then, or waits one slice, or two;\nnothing is in between, and 10 \
         % and 90 % of the runs are 60 ms apart at every size. So a median jumps\nfrom 1 ms to 31 \
         where half of the runs need not wait (the column \"within 15 ms\"). The gains of ack \
         offload are {} by the\nmedians and {} by the means (of 100 runs: good to an eighth). It \
         changes how many turns there\nare, and that helps at some sizes as much as it hurts at \
         others: what came while the VM waited is read in\nits next slice, whoever acknowledged \
         it.\n\n\
         On a host of today none of that is left: the gains are {} by the medians and {} by the\n\
         means. Where a mean is above its 90 %, a few runs in a hundred end in a later slice.\n\n",
        range(paper, 1),
        range(paper, 0),
        range(today, 1),
        range(today, 0),
    );
    for panel in &results.sweeps {
        let _ = write!(
            text,
            "### {}\n\n\
             | | deeper ring: mean | 10 % | median | 90 % | ack offload: mean | 10 % | median \
             | 90 % | within 15 ms | gain: mean | median |\n|---|{}\n",
            panel.name,
            "---:|".repeat(11),
        );
        for (at, (bytes, _)) in panel.cells.iter().enumerate() {
            let _ = write!(text, "| {} |", size(*bytes));
            for mode in [Mode::DeepRing, Mode::Offload] {
                let all = panel.times(at, mode, Clock::Delivered);
                let [least, middle, most] = [0.1, 0.5, 0.9].map(|share| quantile(&all, share));
                let _ = write!(text, " {:.1} | {least:.1} | {middle:.1} | {most:.1} |", mean(&all));
            }
            let all = panel.times(at, Mode::Offload, Clock::Delivered);
            let soon = all.iter().filter(|ms| **ms < 15.0).count() * 100 / all.len().max(1);
            let [by_mean, by_median] = panel.gains(at, Clock::Delivered);
            let _ = writeln!(text, " {soon} % | {by_mean:.2} | {by_median:.2} |");
        }
        text.push('\n');
    }
}

fn today(text: &mut String, effort: &Effort, results: &Results) {
    text.push_str(
        "## Figure 6 on a host of today: how many times sooner, by the mean (by the median)\n\n\
         The same VMs and loads, slices of 30 ms still, but the host forwards on a core of its \
         own, and a vCPU\nthat is preempted keeps its place in the queue and the rest of its \
         slice, as on Linux. Ack offload\nbeside a deeper ring without. What it saves is the \
         round trip through the guest in slow start: the\nlarger the transfer, the less of it \
         that is.\n\n",
    );
    for clock in [Clock::Acked, Clock::Delivered] {
        let _ = write!(text, "### {}, on a host of today\n\n| panel |", clock.name());
        for bytes in effort.sizes {
            let _ = write!(text, " {} |", size(*bytes));
        }
        let _ = writeln!(text, "\n|---|{}", "---:|".repeat(effort.sizes.len()));
        for panel in &results.today {
            let _ = write!(text, "| ({}) {} |", panel.letter, panel.name);
            for at in 0..panel.cells.len() {
                let [by_mean, by_median] = panel.gains(at, clock);
                let _ = write!(text, " {by_mean:.2} ({by_median:.2}) |");
            }
            text.push('\n');
        }
        text.push('\n');
    }
}

fn size(bytes: u64) -> String {
    if bytes < 1_000_000 {
        format!("{} KB", bytes / 1000)
    } else {
        format!("{} MB", bytes / 1_000_000)
    }
}

fn assumptions(text: &mut String, effort: &Effort) {
    let [delay_from, delay_to] = scene::DELAY_US;
    let [turn_from, turn_to] = scene::TURN_NS.map(|ns| ns / 1000);
    let [frame_from, frame_to] = scene::FRAME_NS.map(|ns| ns / 1000);
    let _ = write!(
        text,
        "## What is measured\n\n\
         - acked: from when the client's `connect` returned until everything was acknowledged to \
         it. With ack\n  offload that is the host's word, and the guest may not have run yet.\n\
         - delivered: from the same instant until the guest's application had read everything.\n\
         - in the guest's eyes: from when the guest's `accept` returned until then; nearest to \
         what the\n  paper calls observed by the VM. What came while the guest did not run is \
         read at once.\n\
         - connect: the SYN is answered by the guest alone, with or without offload, and waits \
         for it.\n\n\
         ## What is assumed\n\n\
         - One core for the VMs and, but in 6(i), the driver domain. Xen's credit scheduler: \
         slices of 30 ms,\n  credits given out every 30 ms by weight (all 256), an OVER domain \
         runs after all UNDER ones, one\n  that wakes with credit preempts (BOOST), and who is \
         preempted goes behind its equals. Debits are\n  exact; Xen samples every 10 ms. A host of \
         today differs only as said there.\n\
         - A load is work that comes in at a steady rate and is never shed: what could not be done \
         is caught\n  up on. Three VMs at 40, 60 or 80 % want more than a core and are never \
         idle: 6(d), (e) and (f) do\n  not show the load, only where the scheduler stands. The \
         paper does not say how its load behaves.\n\
         - Times come in steps of 30 ms, so a median may jump by a factor from one cell to the \
         next.\n\
         - The driver domain always preempts. A frame is in the ring when its turn begins; turns \
         are {turn_from} to\n  {turn_to} us apart, and {frame_from} to {frame_to} us more for each \
         frame. Its own processor time is not taken from\n  the VMs. In Figure 2 it is a VM \
         without load that shares the core with the three.\n\
         - A VM pays {} us for each frame; while it runs, network work comes before its load.\n\
         - Rings: plain {} posted buffers of a frame each (the paper: \"relatively few\"), deeper \
         and with ack\n  offload {} (75 % of 256), and {} frames wait in front of a full one; the \
         next is lost.\n\
         - Ack offload is Nightporter's, not vSnoop's: what it acknowledges it stores, with a \
         budget of\n  {} MB per VM; vSnoop had the ring alone. No checksum or segmentation offload \
         toward VMs.\n\
         - Network: 1 Gb/s, {delay_from} to {delay_to} us each way, no loss. A ping is an ARP \
         request and its reply.\n\
         - TCP on both sides is the simulator's: Reno with SACK, first flight and first window of \
         {} segments as\n  Linux had then, receive buffer {} KB, ACK at least every second \
         segment, minimum timeout 200 ms.\n\
         - Delays and the driver domain's times are drawn for each run; the same seeds for every \
         mode. Transfers\n  do not follow each other: each has a world of its own and begins at \
         an instant of chance.\n\
         - Runs: {} pings for each number of VMs, {} transfers for each curve of Figure 5, {} for \
         each number of\n  Figure 6 and the sweeps up to 1 MB and {} above (the paper: 1000).\n\
         - MB are 10^6 bytes.\n",
        scene::GUEST_FRAME_NS / 1000,
        scene::RING_PLAIN,
        scene::RING_DEEP,
        scene::BACKLOG_FRAMES,
        scene::BUDGET_BYTES >> 20,
        scene::FIRST_SEGMENTS,
        scene::RECEIVE_BYTES >> 10,
        effort.pings,
        effort.transfers,
        effort.runs[0],
        effort.runs[1],
    );
}
