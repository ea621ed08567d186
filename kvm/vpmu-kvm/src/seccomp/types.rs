//! The lists of system calls as seccompiler's rules, for a VMM that makes its filters in Rust.

use std::collections::BTreeMap;

use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

use super::Syscall;

/// Adds rules for `calls`, such as [`SYSCALLS`](crate::SYSCALLS) or those of [`SETUP_SYSCALLS`](crate::SETUP_SYSCALLS),
/// to the rules of a filter whose match action is `Allow`. A call that either side allows without conditions stays
/// allowed without conditions: of a mixture, seccompiler would keep the conditions.
///
/// ```
/// use std::collections::BTreeMap;
/// use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
///
/// // The VMM's own rules for its vCPUs' threads come first, those for the thread that makes VMs in another filter.
/// let mut vcpu = BTreeMap::from([(libc::SYS_exit, vec![])]);
/// vpmu_kvm::add_seccomp_rules(&mut vcpu, vpmu_kvm::SYSCALLS);
/// let mut setup = BTreeMap::new();
/// for (_function, calls) in vpmu_kvm::SETUP_SYSCALLS {
///     vpmu_kvm::add_seccomp_rules(&mut setup, calls.iter());
/// }
/// for rules in [vcpu, setup] {
///     let arch = std::env::consts::ARCH.try_into()?;
///     let filter = SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, arch)?;
///     let _program: BpfProgram = filter.try_into()?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn add_seccomp_rules<'a>(
    rules: &mut BTreeMap<i64, Vec<SeccompRule>>,
    calls: impl IntoIterator<Item = &'a Syscall>,
) {
    for call in calls {
        let known = rules.get(&call.number);
        if known.is_some_and(Vec::is_empty) {
            continue;
        }
        let conditions = call.arguments.iter().map(|argument| {
            let (length, value) = (SeccompCmpArgLen::Dword, argument.value.into());
            let condition = SeccompCondition::new(argument.index, length, SeccompCmpOp::Eq, value);
            condition.expect("an argument's index is 0 to 5, and its value has 32 bits")
        });
        // A rule has at least one condition; a call without rules is allowed whole.
        match SeccompRule::new(conditions.collect()) {
            Err(_) => drop(rules.insert(call.number, Vec::new())),
            Ok(rule) => {
                let known = rules.entry(call.number).or_default();
                // A filter that has the same rule twice is larger, and slower for each call.
                if !known.contains(&rule) {
                    known.push(rule);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SETUP_SYSCALLS, SYSCALLS};

    fn of<'a>(calls: impl IntoIterator<Item = &'a Syscall>) -> BTreeMap<i64, Vec<SeccompRule>> {
        let mut rules = BTreeMap::new();
        add_seccomp_rules(&mut rules, calls);
        rules
    }

    /// What the JSON form becomes is compiled from the same rules.
    #[test]
    fn they_are_the_rules_of_the_json() {
        let setup = SETUP_SYSCALLS.iter().flat_map(|(_, calls)| *calls);
        let both = [
            (of(SYSCALLS), crate::seccomp_rules()),
            (of(setup), crate::seccomp_setup_rules()),
        ];
        for (rules, json) in both {
            let json: serde_json::Value = serde_json::from_str(&json).unwrap();
            let json = json.as_array().unwrap();
            let conditions = |number: &i64| {
                let named = SYSCALLS
                    .iter()
                    .chain(SETUP_SYSCALLS.iter().flat_map(|(_, calls)| *calls));
                let name = named
                    .clone()
                    .find(|call| call.number == *number)
                    .unwrap()
                    .name;
                let of_call = json.iter().filter(|rule| rule["syscall"] == name);
                let is_whole = of_call.clone().any(|rule| rule["args"].is_null());
                if is_whole { 0 } else { of_call.count() }
            };
            assert!(rules.len() > 10);
            for (number, rules) in &rules {
                assert_eq!(rules.len(), conditions(number), "call {number}");
            }
        }
    }

    #[test]
    fn a_call_that_is_allowed_whole_stays_so() {
        let ioctl = SYSCALLS.iter().find(|call| call.name == "ioctl").unwrap();
        let whole = Syscall {
            arguments: &[],
            ..*ioctl
        };
        for calls in [[*ioctl, whole], [whole, *ioctl]] {
            assert_eq!(of(&calls)[&ioctl.number], []);
        }
        assert_eq!(of(&[*ioctl, *ioctl])[&ioctl.number].len(), 1);
    }
}
