//! The samples of an experiment, and their file.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::origin::Origin;
use super::stats::{Quantiles, Ratio, round3};
use super::verdict::{Check, Verdict};
use super::{Better, Cell, Experiment, Measure, Values};

/// One sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    /// Samples of one round belong together.
    pub(crate) round: usize,
    /// By measure.
    pub(crate) values: Map<String, Value>,
    /// All else that was seen.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub(crate) detail: Value,
}

impl Sample {
    pub(crate) fn value(&self, measure: &str) -> Option<f64> {
        self.values.get(measure)?.as_f64()
    }
}

/// The samples of an arm in a case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ArmSamples {
    pub(crate) case: String,
    pub(crate) arm: String,
    pub(crate) samples: Vec<Sample>,
    /// Why some could not be taken.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) failures: Vec<String>,
}

/// The file.
#[derive(Debug, Serialize, Deserialize)]
struct File {
    experiment: String,
    origin: Origin,
    settings: Value,
    /// In the order in which they were expected, or had their first samples.
    arms: Vec<ArmSamples>,
    /// Facts about a case besides.
    about: Map<String, Value>,
    #[serde(skip_deserializing)]
    checks: Vec<Check>,
}

/// The samples of an experiment so far, and the verdicts on them.
#[derive(Debug)]
pub(crate) struct Results {
    pub(super) measures: &'static [Measure],
    path: PathBuf,
    file: File,
}

impl Results {
    /// Of an experiment that begins, or goes on where a run was cut off.
    ///
    /// # Errors
    /// The machine does not tell what it is.
    pub(crate) fn open(experiment: &Experiment) -> Result<Self> {
        let file = File {
            experiment: experiment.name.to_owned(),
            origin: Origin::here()?,
            settings: experiment.settings.clone(),
            arms: Vec::new(),
            about: Map::new(),
            checks: Vec::new(),
        };
        let mut it = Self { measures: experiment.measures, path: experiment.path(), file };
        if let Some(before) = it.read_unfinished() {
            let count: usize = before.arms.iter().map(|arm| arm.samples.len()).sum();
            let path = it.unfinished();
            eprintln!("goes on with {count} samples of {}; begins anew without it", path.display());
            (it.file.arms, it.file.about) = (before.arms, before.about);
        }
        Ok(it)
    }

    /// The result of an experiment that is finished, if there is one.
    ///
    /// # Errors
    /// It cannot be read, or is no result.
    pub(crate) fn read(experiment: &Experiment) -> Result<Option<Self>> {
        let path = experiment.path();
        let text = match fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| format!("reading {}", path.display()))?,
        };
        let file = serde_json::from_slice(&text);
        let file = file.with_context(|| format!("{} is no result: remove it", path.display()))?;
        Ok(Some(Self { measures: experiment.measures, path, file }))
    }

    /// The experiment's name.
    pub(crate) fn name(&self) -> &str {
        &self.file.experiment
    }

    /// All that was asked for.
    pub(crate) const fn settings(&self) -> &Value {
        &self.file.settings
    }

    /// The machine and the program, for people.
    pub(crate) fn origin_told(&self) -> String {
        self.file.origin.to_string()
    }

    /// How many samples there are.
    pub(crate) fn samples(&self) -> usize {
        self.file.arms.iter().map(|arm| arm.samples.len()).sum()
    }

    /// Without samples, of no machine.
    #[cfg(test)]
    pub(crate) fn of_nothing(measures: &'static [Measure]) -> Self {
        let experiment =
            Experiment { name: "test", measures, settings: Value::Null, out: Some("none".into()) };
        Self::open(&experiment).expect("a machine")
    }

    /// Where samples are until it is finished.
    fn unfinished(&self) -> PathBuf {
        self.path.with_extension("unfinished")
    }

    /// The samples of a run of the same program for the same settings on the same machine.
    fn read_unfinished(&self) -> Option<File> {
        let text = fs::read(self.unfinished()).ok()?;
        let file: File = serde_json::from_slice(&text).ok()?;
        let same = |it: &File| (it.experiment.clone(), it.origin.clone(), it.settings.clone());
        (same(&file) == same(&self.file)).then_some(file)
    }

    fn arm(&self, cell: &Cell) -> Option<&ArmSamples> {
        self.file.arms.iter().find(|arm| arm.case == cell.case && arm.arm == cell.arm)
    }

    /// There is a sample of this round.
    pub(crate) fn has(&self, cell: &Cell, round: usize) -> bool {
        self.arm(cell).is_some_and(|arm| arm.samples.iter().any(|s| s.round == round))
    }

    /// Not all of these have so many samples.
    pub(crate) fn lacks(&self, cells: &[Cell], rounds: usize) -> bool {
        let has = |cell| self.arm(cell).is_some_and(|arm| arm.samples.len() >= rounds);
        !cells.iter().all(has)
    }

    /// Arms stand in this order, whichever has the first sample.
    pub(crate) fn expect(&mut self, cells: &[Cell]) {
        for cell in cells.iter().filter(|cell| self.arm(cell).is_none()).collect::<Vec<_>>() {
            let (case, arm) = (cell.case.clone(), cell.arm.clone());
            let (samples, failures) = (Vec::new(), Vec::new());
            self.file.arms.push(ArmSamples { case, arm, samples, failures });
        }
    }

    /// A sample was taken, or more of one.
    pub(crate) fn note(&mut self, cell: &Cell, round: usize, values: Values) {
        let of = values.of.into_iter().filter(|(_, value)| value.is_finite());
        let values_of = of.map(|(name, value)| (name.to_owned(), round3(value).into())).collect();
        let arm = self.arm_mut(cell);
        match arm.samples.binary_search_by_key(&round, |sample| sample.round) {
            Ok(at) => arm.samples[at].values.extend::<Map<String, Value>>(values_of),
            Err(at) => {
                let sample = Sample { round, values: values_of, detail: values.detail };
                arm.samples.insert(at, sample);
            }
        }
    }

    /// A sample could not be taken, and the run goes on.
    pub(crate) fn fail(&mut self, cell: &Cell, why: String) {
        self.arm_mut(cell).failures.push(why);
    }

    fn arm_mut(&mut self, cell: &Cell) -> &mut ArmSamples {
        self.expect(std::slice::from_ref(cell));
        let is_it = |arm: &&mut ArmSamples| arm.case == cell.case && arm.arm == cell.arm;
        self.file.arms.iter_mut().find(is_it).expect("it is expected")
    }

    /// Writes what there is, so that a run that is cut off now can go on.
    ///
    /// # Errors
    /// The disk does not take it.
    pub(crate) fn keep(&self) -> Result<()> {
        self.write(&self.unfinished())
    }

    fn write(&self, path: &std::path::Path) -> Result<()> {
        let dir = path.parent().context("a file has a directory")?;
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        let new = path.with_extension("new");
        let text = serde_json::to_string(&self.file)? + "\n";
        fs::write(&new, text).with_context(|| format!("writing {}", new.display()))?;
        fs::rename(&new, path).with_context(|| format!("naming {}", path.display()))
    }

    /// Cases in their order.
    pub(crate) fn cases(&self) -> Vec<&str> {
        let mut cases: Vec<&str> = Vec::new();
        for arm in &self.file.arms {
            if !cases.contains(&&*arm.case) {
                cases.push(&arm.case);
            }
        }
        cases
    }

    /// The arms of a case.
    pub(crate) fn arms<'a>(&'a self, case: &'a str) -> impl Iterator<Item = &'a ArmSamples> {
        self.file.arms.iter().filter(move |arm| arm.case == case)
    }

    /// The values of an arm in a case, in the order of the rounds.
    pub(crate) fn values(&self, case: &str, arm: &str, measure: &str) -> Vec<f64> {
        let samples = self.arms(case).find(|it| it.arm == arm).map_or(&[][..], |it| &it.samples);
        samples.iter().filter_map(|sample| sample.value(measure)).collect()
    }

    /// All else that was seen in the samples of an arm.
    pub(crate) fn details<'a>(
        &'a self,
        case: &'a str,
        arm: &'a str,
    ) -> impl Iterator<Item = &'a Value> {
        let of_arm = self.arms(case).filter(move |it| it.arm == arm);
        of_arm.flat_map(|it| it.samples.iter().map(|sample| &sample.detail))
    }

    /// Of them.
    pub(crate) fn quantiles(&self, case: &str, arm: &str, measure: &str) -> Option<Quantiles> {
        Quantiles::of(self.values(case, arm, measure))
    }

    /// The median of one arm over that of another, over the rounds that both have.
    pub(crate) fn ratio(&self, case: &str, arm: &str, over: &str, measure: &str) -> Option<Ratio> {
        let find = |arm| self.arms(case).find(|it: &&ArmSamples| it.arm == arm);
        let (it, other) = (find(arm)?, find(over)?);
        let pair = |sample: &Sample| {
            let at = other.samples.binary_search_by_key(&sample.round, |of| of.round).ok()?;
            Some((sample.value(measure)?, other.samples[at].value(measure)?))
        };
        let pairs: Vec<_> = it.samples.iter().filter_map(pair).collect();
        Ratio::of_medians(&pairs)
    }

    /// How many times better one arm is than another.
    pub(crate) fn gain(&self, case: &str, arm: &str, over: &str, of: &Measure) -> Option<Ratio> {
        match of.better {
            Better::More => self.ratio(case, arm, over, of.name),
            Better::Less => self.ratio(case, over, arm, of.name),
            Better::Neither => None,
        }
    }

    /// Something is known of a case, as of its world.
    pub(crate) fn tell(&mut self, case: &str, about: Value) {
        self.file.about.insert(case.to_owned(), about);
    }

    /// A condition was looked at.
    pub(crate) fn check(&mut self, check: Check) {
        self.file.checks.push(check);
    }

    /// The conditions that were looked at.
    pub(crate) fn checks(&self) -> &[Check] {
        &self.file.checks
    }

    /// Prints the table and the verdicts, and writes the result's file; whether no condition is
    /// broken.
    ///
    /// # Errors
    /// The disk does not take it.
    pub(crate) fn finish(self) -> Result<bool> {
        println!("{}", self.table());
        println!("All of it, with every sample: {}", self.path.display());
        self.save()
    }

    /// The same without a word.
    ///
    /// # Errors
    /// The disk does not take it.
    pub(crate) fn save(self) -> Result<bool> {
        self.write(&self.path)?;
        let _ = fs::remove_file(self.unfinished()); // there is none if nothing was kept
        Ok(self.checks().iter().all(|check| check.verdict != Verdict::Broken))
    }
}
