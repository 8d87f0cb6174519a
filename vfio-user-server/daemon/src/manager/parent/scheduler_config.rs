//! Scheduler settings of a parent, kept in `<config-dir>/<parent>/.scheduler.json`.
//!
//! The file holds only settings that an operator has changed, so that a new default takes effect
//! for the others. Its name begins with a dot, which sets it apart from definitions.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mdev_core::durable;
use mdev_core::sched::{Averaging, Config};
use mdev_core::untrusted::read_whole;

use crate::manager::Result;
use vgpud_api::{ErrorCode, ErrorDetail, ModifyScheduler};

/// Limit of the settings file, in bytes.
const MAX_BYTES: usize = 4096;

/// Scheduler settings of one parent.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    file: PathBuf,
    set: ModifyScheduler,
}

impl SchedulerConfig {
    /// Reads a parent's settings. A file that cannot be read is logged, and the defaults apply.
    pub fn load(config_dir: &Path, parent: &str) -> Self {
        let file = config_dir.join(parent).join(".scheduler.json");
        let set = match read(&file) {
            Ok(set) => set,
            Err(error) if error.kind() == io::ErrorKind::NotFound => ModifyScheduler::default(),
            Err(error) => {
                log::error!("{}: {error}; the defaults are in force", file.display());
                ModifyScheduler::default()
            }
        };
        let config = Self { file, set };
        match config.config(Config::new(Duration::from_millis(2))) {
            Ok(_) => config,
            Err(error) => {
                log::error!("{}: {error}; the defaults are in force", config.file.display());
                Self { set: ModifyScheduler::default(), ..config }
            }
        }
    }

    /// Returns the settings with a change applied. A change that contradicts itself is refused.
    pub fn with(&self, change: &ModifyScheduler) -> Result<Self> {
        let change = change.clone();
        let tuned = change.averaging_factor.is_some() || change.frequency.is_some();
        let averaging = change.averaging.or(tuned.then_some(true)).or(self.set.averaging);
        let refuse = |what: &str| Err(ErrorDetail::new(ErrorCode::Invalid, what));
        if tuned && averaging == Some(false) {
            return refuse(
                "A factor or frequency is for averaging; leave them out to switch it off",
            );
        }
        if change.timeslice_us.is_some() && averaging == Some(true) {
            return refuse(
                "Averaging sets the time slice from its frequency; set the frequency, or switch averaging off",
            );
        }
        let set = ModifyScheduler {
            policy: change.policy.or_else(|| self.set.policy.clone()),
            timeslice_us: change.timeslice_us.or(self.set.timeslice_us),
            period_us: change.period_us.or(self.set.period_us),
            averaging,
            averaging_factor: change.averaging_factor.or(self.set.averaging_factor),
            frequency: change.frequency.or(self.set.frequency),
            overcommit: change.overcommit.or(self.set.overcommit),
        };
        Ok(Self { file: self.file.clone(), set })
    }

    /// Returns the scheduler's configuration on a GPU with these defaults.
    pub fn config(&self, defaults: Config) -> Result<Config> {
        let invalid = |error: &dyn std::fmt::Display| ErrorDetail::new(ErrorCode::Invalid, error);
        let set = &self.set;
        let policy = set.policy.as_deref().map(str::parse).transpose();
        let averaging = Averaging::default();
        let config = Config {
            policy: policy.map_err(|error| invalid(&error))?.unwrap_or(defaults.policy),
            slice: set.timeslice_us.map_or(defaults.slice, Duration::from_micros),
            period: set.period_us.map_or(defaults.period, Duration::from_micros),
            averaging: (set.averaging == Some(true)).then(|| Averaging {
                factor: set.averaging_factor.unwrap_or(averaging.factor),
                frequency: set.frequency.unwrap_or(averaging.frequency),
            }),
            overcommit: set.overcommit.unwrap_or(defaults.overcommit),
        };
        config.check().map_err(|error| invalid(&error))?;
        Ok(config)
    }

    /// Returns the parameters of averaging, whether averaging is on or not.
    pub fn averaging(&self) -> Averaging {
        let default = Averaging::default();
        Averaging {
            factor: self.set.averaging_factor.unwrap_or(default.factor),
            frequency: self.set.frequency.unwrap_or(default.frequency),
        }
    }

    /// Writes the settings. They are on disk when this returns.
    pub fn save(&self) -> Result<()> {
        write(&self.file, &self.set).map_err(|error| {
            let what = format!("Cannot write {}: {error}", self.file.display());
            ErrorDetail::new(ErrorCode::Internal, what)
        })
    }
}

fn read(file: &Path) -> io::Result<ModifyScheduler> {
    Ok(serde_json::from_slice(&read_whole(file, MAX_BYTES)?)?)
}

fn write(path: &Path, set: &ModifyScheduler) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(set)?;
    text.push(b'\n');
    durable::run(&durable::replace(path, &path.with_extension("json.tmp"), text))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use mdev_core::sched::Policy;

    use super::*;

    const DEFAULTS: Config = Config::new(Duration::from_millis(2));

    #[test]
    fn changed_settings_are_restored_and_defaults_are_not_stored() {
        let dir = tempfile::tempdir().unwrap();
        let settings = SchedulerConfig::load(dir.path(), "soft0");
        assert_eq!(settings.config(DEFAULTS).unwrap(), DEFAULTS);
        let change = ModifyScheduler {
            policy: Some("equal-share".into()),
            frequency: Some(100),
            ..ModifyScheduler::default()
        };
        settings.with(&change).unwrap().save().unwrap();
        let change = ModifyScheduler { overcommit: Some(true), ..ModifyScheduler::default() };
        SchedulerConfig::load(dir.path(), "soft0").with(&change).unwrap().save().unwrap();
        let config = SchedulerConfig::load(dir.path(), "soft0").config(DEFAULTS).unwrap();
        let averaging = Some(Averaging { frequency: 100, ..Averaging::default() });
        let expected =
            Config { policy: Policy::EqualShare, averaging, overcommit: true, ..DEFAULTS };
        assert_eq!(config, expected);
        let text = fs::read_to_string(dir.path().join("soft0/.scheduler.json")).unwrap();
        assert!(!text.contains("timeslice") && !text.contains("factor"), "{text}");
        assert_eq!(SchedulerConfig::load(dir.path(), "soft1").config(DEFAULTS).unwrap(), DEFAULTS);
    }

    #[test]
    fn bad_file_means_defaults() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("soft0")).unwrap();
        for text in ["{", "{\"speed\":1}", "{\"policy\":\"fair\"}", "{\"timeslice_us\":1}"] {
            fs::write(dir.path().join("soft0/.scheduler.json"), text).unwrap();
            assert_eq!(
                SchedulerConfig::load(dir.path(), "soft0").config(DEFAULTS).unwrap(),
                DEFAULTS
            );
        }
    }

    #[test]
    fn contradictory_change_is_refused() {
        let settings = SchedulerConfig::load(Path::new("/nonexistent"), "soft0");
        let none = ModifyScheduler::default;
        let off = ModifyScheduler { averaging: Some(false), frequency: Some(100), ..none() };
        assert!(settings.with(&off).unwrap_err().message.contains("leave them out"));
        let on = settings.with(&ModifyScheduler { averaging: Some(true), ..none() }).unwrap();
        let slice = ModifyScheduler { timeslice_us: Some(1000), ..none() };
        assert!(on.with(&slice).unwrap_err().message.contains("switch averaging off"));
        let both = ModifyScheduler { averaging: Some(false), ..slice };
        let config = on.with(&both).unwrap().config(DEFAULTS).unwrap();
        assert_eq!((config.averaging, config.slice), (None, Duration::from_millis(1)));
    }
}
