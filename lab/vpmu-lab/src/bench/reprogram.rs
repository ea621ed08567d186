//! Measures the cost of handling an overflow with real host events, published in 2018 for KVM on
//! Intel. An event that is recreated each time is compared with an event that stays where it runs.
//!
//! The program `vpmu-reprogram` measures this machine's own perf events, those of the lab's machine where it has a
//! PMU, and those of a guest. The latter two are hardware events, which this machine may not have.

use super::{Bench, Context, Row, beside, emulated};
use crate::host::tool::bound_to_us;
use crate::image::artifacts;
use crate::report::figures::Report;
use crate::run::selftest::PERF;
use crate::spec::Request;
use crate::spec::design::{Backing, Design, Pmu, Policy};
use crate::{Error, Result};

pub(super) const BENCH: Bench = Bench {
    name: "reprogram",
    page: include_str!("reprogram.md"),
    has_models: false,
    has_counters: true,
    rows,
};

const PUBLISHED: [(&str, &str, f64); 2] = [
    ("handle_overflow_ns", "recreate", 85_282_765.0),
    ("handle_overflow_ns", "reuse", 97.0),
];

/// What stands before the names of policies in the modes of the lab's machine, and of a guest.
const NATIVE: &str = "native-";
const GUEST: &str = "guest-";
/// The command of the lab's machine and of a guest. It first checks that hardware events keep the promises on which the
/// engine relies, because figures of other events would mean nothing. It handles fewer overflows,
/// as each costs a guest exits.
const IN_GUEST: &str = "vpmu-reprogram --check --backing hardware > check || { cat check; exit 1; }; \
vpmu-reprogram --overflows 200 --backing hardware --json -";

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    let program = artifacts::find_beside(artifacts::REPROGRAM)?;
    let task = "measuring this machine's perf events";
    let task = context.session.progress.task(task);
    let mut command = bound_to_us(&program)?;
    command.args(["--json", "-"]);
    let output = PERF.run(command, context.session.cancel, &|| ())?;
    task.done();
    let said = |said: Option<(Option<Backing>, Vec<Row>)>| {
        let (backing, rows) = said.ok_or_else(|| {
            Error::format(
                &program,
                "said something else than figures; build it anew with script/setup",
            )
        })?;
        // What counts here may be another thing than in the guests.
        if let Some(backing) = backing {
            context.note_backing(backing);
        }
        Ok::<_, Error>(rows)
    };
    let mut rows = said(parse(output.as_bytes(), ""))?;
    let native = context.qemu.has_x86_pmu().then_some(Pmu::Native.into());
    let guest = emulated(&[Policy::default()]);
    let designs: Vec<Design> = native.into_iter().chain(guest).collect();
    let request = Request {
        programs: vec![artifacts::REPROGRAM],
        ..context.request(&[])
    };
    let guests = context.compare(request, "guest", &designs, IN_GUEST)?;
    for guest in &guests {
        let prefix = match guest.design.pmu {
            Pmu::Native => NATIVE,
            _ => GUEST,
        };
        rows.extend(said(parse(&guest.output, prefix))?);
    }
    Ok(rows)
}

/// Reads what has counted for the program, and its figures, whose modes are policies; `prefix` says where it ran.
fn parse(output: &[u8], prefix: &str) -> Option<(Option<Backing>, Vec<Row>)> {
    let report: Report = serde_json::from_slice(output).ok()?;
    let named = report.rows.iter().map(|row| {
        let policy: Policy = row.mode.parse().ok()?;
        Some(Row {
            mode: format!("{prefix}{}", policy.name()),
            ..beside(row.clone(), &PUBLISHED)
        })
    });
    Some((report.backing, named.collect::<Option<_>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_figures_are_added() {
        let (backing, rows) = parse(
            br#"{"backing":"clock","rows":[
                {"figure":"handle_overflow_ns","mode":"reuse","measured":9.5,"unit":"ns"},
                {"figure":"host_ops_per_pmi","mode":"paused","measured":null,"unit":"operations"}]}"#,
            GUEST,
        )
        .unwrap();
        assert_eq!(backing, Some(Backing::Clock));
        assert_eq!(
            (rows[0].measured, rows[0].published),
            (Some(9.5), Some(97.0))
        );
        assert_eq!(rows[0].mode, "guest-reuse");
        assert_eq!((rows[1].measured, rows[1].published), (None, None));
        assert!(
            parse(
                br#"{"rows":[{"figure":"x","mode":"y","measured":1,"unit":"ns"}]}"#,
                ""
            )
            .is_none()
        );
        assert!(parse(b"", "").is_none());
    }
}
