//! The changes, from the present routes: a comparison, without a clock or a socket.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use crate::beats::Nic;
use crate::record::RouteRecord;
use crate::route::Route;

/// A route to change, and its new initial window.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RouteChange {
    /// As it is.
    pub from: Route,
    /// As it is going to be.
    pub to: Route,
    /// No other route has its name: replacing it hits no other.
    pub unique: bool,
}

/// The result of [`plan`].
#[derive(Debug, Default)]
pub struct Plan {
    /// Nothing, if all is as it should be.
    pub steps: Vec<RouteChange>,
    /// The changes to undo once the steps are done.
    pub records: Vec<RouteRecord>,
    /// Routes by a live NIC that do not flood, each with the reason.
    pub left_alone: Vec<(String, &'static str)>,
    /// A live NIC is the only way to other networks, so settings for all connections may be
    /// changed.
    pub only_live: bool,
}

/// Compares `routes` with what should be: every route that leads to `live` NICs alone has an
/// initial window of `segments`, and no other has one of ours. `records` says which those are.
///
/// # Errors
/// A route has metrics that cannot be read.
pub fn plan(
    routes: &[Route],
    records: &[RouteRecord],
    live: &BTreeSet<Nic>,
    segments: u32,
) -> Result<Plan> {
    let mut names = BTreeMap::<String, u32>::new();
    for route in routes {
        *names.entry(route.name()).or_default() += 1;
    }
    let mut plan = Plan { only_live: !live.is_empty(), ..Plan::default() };
    for route in routes.iter().filter(|route| route.is_for_us()) {
        let name = route.name();
        let unique = names.get(&name) == Some(&1);
        let now = route.initcwnd();
        let record = records.iter().find(|r| r.name == name && now == Some(r.ours));
        let outputs = route.outputs();
        let is_live = !outputs.is_empty() && outputs.iter().all(|nic| live.contains(nic));
        plan.only_live &= is_live || !route.leads_away();
        let wanted = is_live.then(|| wanted(route, unique, record, segments));
        let step = |initcwnd| -> Result<RouteChange> {
            Ok(RouteChange { from: route.clone(), to: route.with_initcwnd(initcwnd)?, unique })
        };
        match (wanted, record) {
            (Some(Ok(())), Some(record)) if record.ours == segments => {
                plan.records.push(record.clone());
            }
            (Some(Ok(())), _) => {
                let before = record.map_or(now, |record| record.before);
                plan.records.push(RouteRecord { name, before, ours: segments });
                plan.steps.push(step(Some(segments))?);
            }
            (Some(Err(reason)), None) => plan.left_alone.push((name, reason)),
            (_, Some(record)) => plan.steps.push(step(record.before)?),
            (None, None) => {}
        }
    }
    Ok(plan)
}

/// Whether a route by live NICs may flood.
fn wanted(
    route: &Route,
    unique: bool,
    record: Option<&RouteRecord>,
    segments: u32,
) -> Result<(), &'static str> {
    if record.is_some() {
        Ok(())
    } else if route.is_kernels_own() {
        Err("from a router advertisement, or it expires: a change would make it permanent")
    } else if !unique {
        Err("another route has the same destination and metric")
    } else if route.initcwnd().is_some_and(|now| now >= segments) {
        Err("it has an initial window as large already, not ours")
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::tests::{default_by, default_over};

    const SEGMENTS: u32 = 1000;

    /// Routes as a kernel would have them, and the record of their changes.
    struct Kernel {
        routes: Vec<Route>,
        records: Vec<RouteRecord>,
    }

    impl Kernel {
        fn with(routes: &[Route]) -> Self {
            Self { routes: routes.to_vec(), records: Vec::new() }
        }

        /// Follows the plan for these NICs; returns how many steps that was.
        fn follow(&mut self, live: &[Nic]) -> usize {
            let live = live.iter().copied().collect();
            let plan = plan(&self.routes, &self.records, &live, SEGMENTS).unwrap();
            for step in &plan.steps {
                let at = self.routes.iter().position(|r| *r == step.from).expect("it is there");
                self.routes[at] = step.to.clone();
            }
            self.records = plan.records;
            plan.steps.len()
        }

        fn windows(&self) -> Vec<Option<u32>> {
            self.routes.iter().map(Route::initcwnd).collect()
        }
    }

    #[test]
    fn flood_28_only_routes_by_a_live_nic_flood_and_afterwards_all_is_as_before() {
        let before = [default_by(2, 100), default_by(3, 200), default_over(&[2, 3], 0)];
        let mut kernel = Kernel::with(&before);
        assert_eq!(kernel.follow(&[2]), 1);
        assert_eq!(kernel.windows(), [Some(1000), None, None]);
        assert_eq!(kernel.follow(&[2, 3]), 2);
        assert_eq!(kernel.windows(), [Some(1000); 3]);
        assert_eq!(kernel.follow(&[2, 3]), 0); // nothing to do twice
        assert_eq!(kernel.follow(&[3]), 2);
        assert_eq!(kernel.windows(), [None, Some(1000), None]);
        assert_eq!(kernel.follow(&[]), 1);
        assert_eq!(kernel.routes, before);
        assert_eq!(kernel.records, []);
    }

    #[test]
    fn a_way_to_other_networks_by_another_nic_is_noticed() {
        let only_live = |routes: &[Route], live: &[Nic]| {
            plan(routes, &[], &live.iter().copied().collect(), SEGMENTS).unwrap().only_live
        };
        let both = [default_by(2, 100), default_by(3, 200)];
        assert!(only_live(&both, &[2, 3]) && only_live(&both[..1], &[2]));
        assert!(!only_live(&both, &[2]) && !only_live(&both[..1], &[]));
        assert!(!only_live(&[default_over(&[2, 3], 0)], &[2]));
    }

    #[test]
    fn a_window_that_a_route_had_is_given_back() {
        let before = [default_by(2, 100).with_initcwnd(Some(20)).unwrap()];
        let mut kernel = Kernel::with(&before);
        kernel.follow(&[2]);
        assert_eq!(kernel.windows(), [Some(1000)]);
        kernel.follow(&[]);
        assert_eq!(kernel.routes, before);
    }

    #[test]
    fn a_route_that_was_replaced_in_the_meantime_stays_as_it_is() {
        let mut kernel = Kernel::with(&[default_by(2, 100), default_by(2, 200)]);
        kernel.follow(&[2]);
        // One route gets another window, and the other is made anew by another NIC.
        kernel.routes[0] = default_by(2, 100).with_initcwnd(Some(30)).unwrap();
        kernel.routes[1] = default_by(3, 200);
        let theirs = kernel.routes.clone();
        assert_eq!(kernel.follow(&[]), 0);
        assert_eq!(kernel.routes, theirs);
        assert_eq!(kernel.records, []);
    }

    #[test]
    fn a_route_that_comes_anew_floods_again() {
        let mut kernel = Kernel::with(&[default_by(2, 100)]);
        kernel.follow(&[2]);
        kernel.routes = vec![];
        assert_eq!(kernel.follow(&[2]), 0);
        kernel.routes = vec![default_by(2, 100)];
        assert_eq!(kernel.follow(&[2]), 1);
        assert_eq!(kernel.windows(), [Some(1000)]);
    }

    #[test]
    fn a_larger_window_of_somebody_elses_is_left_and_said() {
        let larger = default_by(2, 100).with_initcwnd(Some(2000)).unwrap();
        let found = plan(&[larger], &[], &[2].into(), SEGMENTS).unwrap();
        assert!(found.steps.is_empty() && found.records.is_empty());
        assert_eq!(found.left_alone.len(), 1);
    }

    #[test]
    fn two_routes_of_one_name_are_left_alone_but_ours_is_undone() {
        let twins = [default_by(2, 100), default_by(3, 100)];
        let live = [2, 3].into();
        let found = plan(&twins, &[], &live, SEGMENTS).unwrap();
        assert!(found.steps.is_empty());
        assert_eq!(found.left_alone.len(), 2);
        // The second came after the first had been changed.
        let mut kernel = Kernel::with(&twins[..1]);
        kernel.follow(&[2]);
        kernel.routes.push(twins[1].clone());
        let found = plan(&kernel.routes, &kernel.records, &[].into(), SEGMENTS).unwrap();
        assert_eq!(found.steps.len(), 1);
        assert!(!found.steps[0].unique);
        kernel.follow(&[]);
        assert_eq!(kernel.routes, twins);
    }

    #[test]
    fn what_an_earlier_watcher_with_another_window_left_is_taken_over() {
        let mut kernel = Kernel::with(&[default_by(2, 100).with_initcwnd(Some(500)).unwrap()]);
        let name = default_by(2, 100).name();
        kernel.records = vec![RouteRecord { name, before: None, ours: 500 }];
        assert_eq!(kernel.follow(&[2]), 1);
        assert_eq!(kernel.windows(), [Some(1000)]);
        kernel.follow(&[]);
        assert_eq!(kernel.routes, [default_by(2, 100)]);
    }
}
