//! The processor: one core shared by machines, event-driven.
//!
//! A machine is runnable while it has network work, or other work (its load). Load arrives at a
//! steady rate, is done in bursts, and is never shed: stolen time is caught up on. A load that shed
//! work would hide the effect under study. While a machine has the core, its network work is done
//! at once, as an interrupt is.

use nightporter_core::time::{Duration, Instant};

use crate::plan::Policy;

/// A machine begins a burst of other work when so much has come together.
const BURST: Duration = Duration::from_millis(5);
/// Xen gives out credits this often (sched_credit.c, CSCHED_TICKS_PER_TSLICE).
const CREDIT_PERIOD: Duration = Duration::from_millis(30);

/// A machine that shares the core.
#[derive(Clone, Copy, Debug)]
pub struct Entity {
    /// Its share relative to others.
    pub weight: u32,
    /// Percent of the core its other work wants.
    pub load_percent: u32,
}

#[derive(Clone, Copy, Debug)]
struct Task {
    weight: u64,
    load_percent: u64,
    /// There is network work.
    awake: bool,
    /// A burst of other work is under way.
    bursting: bool,
    paused: bool,
    /// Other work done so far, in nanoseconds.
    load_done_ns: u64,
    /// Xen: credit left in nanoseconds, whether there was none when credits were last given out
    /// (its priority is OVER, else UNDER), and whether it woke with some left (BOOST).
    credit_ns: i64,
    over: bool,
    boosted: bool,
    /// The rest of the slice in which it was preempted, if it keeps its place.
    left_ns: u64,
    /// Proportional share: time received by weight, and when its request should be served.
    vruntime_ns: u64,
    vdeadline_ns: u64,
    /// Quota used in the current period.
    used_ns: u64,
    /// When it was last queued: round robin goes by this.
    queued: u64,
}

/// One core. All calls settle accounts up to `now` first.
#[derive(Debug)]
pub struct Core {
    policy: Policy,
    tasks: Vec<Task>,
    current: Option<usize>,
    settled_at: Instant,
    slice_end: Instant,
    period_end: Instant,
    queue_count: u64,
}

impl Core {
    /// A core on which nothing runs yet.
    #[must_use]
    pub fn new(policy: Policy, entities: &[Entity]) -> Self {
        let task = |(i, e): (usize, &Entity)| Task {
            weight: e.weight.max(1).into(),
            load_percent: e.load_percent.into(),
            awake: false,
            bursting: false,
            paused: false,
            // Loads that began at the same instant would stay in step for ever.
            load_done_ns: 0,
            credit_ns: 0,
            over: false,
            boosted: false,
            left_ns: 0,
            vruntime_ns: 0,
            vdeadline_ns: 0,
            used_ns: 0,
            queued: i as u64,
        };
        let tasks: Vec<Task> = entities.iter().enumerate().map(task).collect();
        let mut core = Self {
            policy,
            queue_count: tasks.len() as u64,
            tasks,
            current: None,
            settled_at: Instant::ZERO,
            slice_end: Instant::MAX,
            period_end: Instant::ZERO + period_of(policy),
        };
        core.handle_timeout(Instant::ZERO);
        core
    }

    /// Whether machine `i` has a processor.
    #[must_use]
    pub fn is_running(&self, i: usize) -> bool {
        match self.policy {
            Policy::Dedicated => !self.tasks[i].paused,
            _ => self.current == Some(i),
        }
    }

    /// The one that runs, unless everybody does.
    #[must_use]
    pub fn current(&self) -> Option<usize> {
        self.current
    }

    /// Machine `i` has network work.
    pub fn wake(&mut self, now: Instant, i: usize) {
        if self.tasks[i].awake || self.policy == Policy::Dedicated {
            return;
        }
        self.settle(now);
        let was_runnable = self.runnable(i);
        self.tasks[i].awake = true;
        if was_runnable || self.current == Some(i) {
            return;
        }
        self.enqueue(i);
        match self.policy {
            Policy::Credit { boost: true, .. } | Policy::KeepsPlace { .. }
                if !self.tasks[i].over =>
            {
                self.tasks[i].boosted = true;
                if self.current.is_none_or(|c| !self.tasks[c].boosted) {
                    self.preempt(now);
                }
            }
            Policy::Fair { .. } | Policy::Quota { .. } => {
                let mine = self.tasks[i].vdeadline_ns;
                if self.current.is_none_or(|c| mine < self.tasks[c].vdeadline_ns) {
                    self.pick(now);
                }
            }
            _ if self.current.is_none() => self.pick(now),
            _ => {}
        }
    }

    /// A machine with a boost takes the core from the present one.
    fn preempt(&mut self, now: Instant) {
        match (self.current, self.policy) {
            (Some(c), Policy::KeepsPlace { .. }) => {
                self.tasks[c].left_ns = self.slice_end.since(now).as_nanos();
            }
            // Xen queues who is preempted behind its equals, and whoever comes next has a whole
            // slice (sched_credit.c, __runq_insert).
            (Some(c), _) => self.enqueue(c),
            (None, _) => {}
        }
        self.pick(now);
    }

    /// Machine `i` has done its network work.
    pub fn idle(&mut self, now: Instant, i: usize) {
        if !self.tasks[i].awake {
            return;
        }
        self.settle(now);
        (self.tasks[i].awake, self.tasks[i].boosted) = (false, false);
        if self.current == Some(i) && !self.runnable(i) {
            self.pick(now);
        }
    }

    /// Machine `i` does not run at all, or does again.
    pub fn set_paused(&mut self, now: Instant, i: usize, on: bool) {
        self.settle(now);
        if self.tasks[i].paused && !on && (self.tasks[i].awake || self.tasks[i].bursting) {
            // A pause is no claim to what the others ran meanwhile, whether they want to run now or
            // not (seed 38881).
            let others = self.tasks.iter().map(|t| t.vruntime_ns).max();
            self.tasks[i].vruntime_ns = others.unwrap_or(0);
            self.enqueue(i);
        }
        self.tasks[i].paused = on;
        if (on && self.current == Some(i)) || (!on && self.current.is_none()) {
            self.pick(now);
        }
    }

    /// From now on everybody runs.
    pub fn dedicate(&mut self) {
        self.policy = Policy::Dedicated;
        self.current = None;
    }

    /// When [`Self::handle_timeout`] has something to decide.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        if self.policy == Policy::Dedicated {
            return None;
        }
        let mut at = Instant::MAX;
        for (i, task) in self.tasks.iter().enumerate() {
            if task.load_percent == 0 || task.paused {
                continue;
            }
            if !task.bursting {
                at = at.min(self.burst_at(task));
            } else if self.current == Some(i) && !task.awake && task.load_percent < 100 {
                let left = self.backlog_ns(task, self.settled_at);
                let span = left * 100 / (100 - task.load_percent) + 1;
                at = at.min(self.settled_at + Duration::from_nanos(span));
            }
        }
        let contended = (0..self.tasks.len()).any(|i| self.current != Some(i) && self.wants(i));
        if contended || matches!(self.policy, Policy::Quota { .. }) && self.current.is_some() {
            at = at.min(self.slice_end);
        }
        let gives_out = !matches!(self.policy, Policy::RoundRobin { .. } | Policy::Fair { .. });
        if contended && gives_out {
            at = at.min(self.period_end);
        }
        (at < Instant::MAX).then_some(at)
    }

    /// Bursts begin and end, slices and periods end.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.policy == Policy::Dedicated {
            return;
        }
        self.settle(now);
        self.new_period(now);
        for i in 0..self.tasks.len() {
            let task = self.tasks[i];
            let backlog = self.backlog_ns(&task, now);
            if !task.bursting && task.load_percent > 0 && now >= self.burst_at(&task) {
                if !task.awake {
                    self.enqueue(i);
                }
                self.tasks[i].bursting = true;
            } else if task.bursting && backlog == 0 {
                self.tasks[i].bursting = false;
            }
        }
        let over = now >= self.slice_end;
        if let Some(c) = self.current.filter(|_| over) {
            self.enqueue(c);
            self.tasks[c].boosted = false;
        }
        if over || self.current.is_none_or(|c| !self.runnable(c)) {
            self.pick(now);
        }
    }

    fn settle(&mut self, now: Instant) {
        let ran = now.since(self.settled_at).as_nanos();
        self.settled_at = self.settled_at.max(now);
        let Some(task) = self.current.map(|c| &mut self.tasks[c]) else { return };
        task.load_done_ns += if task.bursting { ran } else { 0 };
        task.credit_ns -= i64::try_from(ran).unwrap_or(i64::MAX);
        task.vruntime_ns += ran * 256 / task.weight;
        task.used_ns += ran;
    }

    fn new_period(&mut self, now: Instant) {
        let period = period_of(self.policy);
        if now < self.period_end {
            return;
        }
        let elapsed = now.since(self.period_end).as_nanos() / period.as_nanos();
        self.period_end = self.period_end + period.saturating_mul(elapsed + 1);
        // Xen shares credits among those that want to run; nobody saves up more than a slice.
        let wanting: u64 =
            self.tasks.iter().filter(|t| t.awake || t.bursting).map(|t| t.weight).sum();
        let period_ns = i64::try_from(period.as_nanos()).unwrap_or(i64::MAX);
        for task in &mut self.tasks {
            task.used_ns = 0;
            let share = period_ns * i64::try_from(task.weight).unwrap_or(1)
                / i64::try_from(wanting.max(task.weight)).unwrap_or(1);
            task.credit_ns = (task.credit_ns + share).clamp(-period_ns, period_ns);
            task.over = task.credit_ns < 0;
        }
        if let Some(c) = self.current.filter(|_| matches!(self.policy, Policy::Quota { .. })) {
            self.slice_end = self.slice_end.min(now + self.slice_of(c));
        }
    }

    fn pick(&mut self, now: Instant) {
        let next = (0..self.tasks.len()).filter(|&i| self.runnable(i)).min_by_key(|&i| {
            let t = &self.tasks[i];
            match self.policy {
                // Boosted first, then those with credit left, then by turn.
                Policy::Credit { .. } | Policy::KeepsPlace { .. } => {
                    (u64::from(!t.boosted) + u64::from(t.over && !t.boosted), t.queued)
                }
                Policy::Fair { .. } | Policy::Quota { .. } => {
                    let eligible = t.vruntime_ns <= self.average_ns();
                    (u64::from(!eligible), t.vdeadline_ns)
                }
                Policy::Dedicated | Policy::RoundRobin { .. } => (0, t.queued),
            }
        });
        self.current = next;
        self.slice_end = next.map_or(Instant::MAX, |i| now + self.slice_of(i));
        if let Some(i) = next {
            let left = std::mem::take(&mut self.tasks[i].left_ns);
            if left > 0 {
                self.slice_end = now + Duration::from_nanos(left);
            }
            let request = self.slice_of(i).as_nanos() * 256 / self.tasks[i].weight;
            self.tasks[i].vdeadline_ns = self.tasks[i].vruntime_ns + request;
        }
    }

    fn slice_of(&self, i: usize) -> Duration {
        match self.policy {
            Policy::Credit { slice_us, .. }
            | Policy::KeepsPlace { slice_us }
            | Policy::RoundRobin { slice_us }
            | Policy::Fair { slice_us } => Duration::from_micros(slice_us.into()),
            Policy::Quota { quota_us, .. } => {
                let left = (u64::from(quota_us) * 1000).saturating_sub(self.tasks[i].used_ns);
                Duration::from_nanos(left.clamp(1000, 3_000_000))
            }
            Policy::Dedicated => Duration::from_secs(1),
        }
    }

    /// To the end of the queue; one that slept brings no claims from then (EEVDF: lag 0).
    fn enqueue(&mut self, i: usize) {
        (self.tasks[i].queued, self.tasks[i].left_ns) = (self.queue_count, 0);
        self.queue_count += 1;
        if self.current != Some(i) {
            let average = self.average_ns();
            let request = self.slice_of(i).as_nanos() * 256 / self.tasks[i].weight;
            let task = &mut self.tasks[i];
            task.vruntime_ns = task.vruntime_ns.max(average);
            task.vdeadline_ns = task.vruntime_ns + request;
        }
    }

    fn average_ns(&self) -> u64 {
        let runnable =
            || (0..self.tasks.len()).filter(|&i| self.runnable(i)).map(|i| &self.tasks[i]);
        let weights: u64 = runnable().map(|t| t.weight).sum();
        let sum: u128 = runnable().map(|t| u128::from(t.vruntime_ns) * u128::from(t.weight)).sum();
        u64::try_from(sum / u128::from(weights.max(1))).unwrap_or(u64::MAX)
    }

    fn wants(&self, i: usize) -> bool {
        let t = &self.tasks[i];
        (t.awake || t.bursting) && !t.paused
    }

    fn runnable(&self, i: usize) -> bool {
        let throttled = match self.policy {
            Policy::Quota { quota_us, .. } => self.tasks[i].used_ns >= u64::from(quota_us) * 1000,
            _ => false,
        };
        self.wants(i) && !throttled
    }

    fn backlog_ns(&self, task: &Task, now: Instant) -> u64 {
        (now.as_nanos() / 100 * task.load_percent).saturating_sub(task.load_done_ns)
    }

    /// When the next burst of other work begins.
    fn burst_at(&self, task: &Task) -> Instant {
        let due = (task.load_done_ns + BURST.as_nanos()) / task.load_percent.max(1) * 100 + 100;
        Instant::from_nanos(due)
    }
}

/// How often credits or quotas are given out.
fn period_of(policy: Policy) -> Duration {
    match policy {
        Policy::Quota { period_us, .. } => Duration::from_micros(u64::from(period_us).max(1)),
        _ => CREDIT_PERIOD,
    }
}

#[cfg(test)]
mod tests;
