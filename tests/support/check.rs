//! Runs calls of attention and holds them against what the reference answers.

use super::{Array, Case, IfWrong, Invocation, U8, answers, assert_allowed, for_both_sides, members};

/// Asserts that results are what is allowed.
pub type Judge<'a> = Box<dyn Fn(&[Array]) + 'a>;

/// A call of attention whose results the reference knows.
pub trait Checked {
    /// The attention that it computes, or differentiates.
    fn case(&self) -> &Case;

    fn case_mut(&mut self) -> &mut Case;

    fn call(&self) -> Invocation;

    /// What a call computes: the results up to one that was not asked for, or the workspace.
    fn computed<'a>(&self, results: &'a [Array]) -> &'a [Array] {
        let end = results.iter().position(|x| x.dtype == U8 || x.dims == [0]);
        &results[..end.unwrap_or(results.len())]
    }

    /// What is allowed of the call's results.
    fn judge(&self, if_wrong: IfWrong) -> Judge<'_>;

    /// Two runs have the same bits.
    fn repeats(&self) -> bool {
        true
    }

    /// Run against both guards; the results are what is allowed. Gives the results of both.
    fn check_against(&self, if_wrong: IfWrong) -> [Vec<Array>; 2] {
        let (judge, call, mut found) = (self.judge(if_wrong), self.call(), Vec::new());
        for_both_sides(|side| {
            let results = call.results(side);
            judge(&results);
            found.push(self.computed(&results).to_vec());
        });
        found.try_into().unwrap()
    }

    /// The same of a call whose metadata is right throughout, from run to run.
    fn check(&self) -> Vec<Array> {
        let case = self.case();
        assert!(members(case).iter().all(|m| m.specified || m.len_q == 0), "{}: not everything is checked", case.name);
        let [first, second] = self.check_against(IfWrong::Unspecified);
        assert!(!self.repeats() || first == second, "{}: two runs differ", case.name);
        first
    }
}

impl Checked for Case {
    fn case(&self) -> &Case {
        self
    }

    fn case_mut(&mut self) -> &mut Case {
        self
    }

    fn call(&self) -> Invocation {
        self.invocation()
    }

    fn judge(&self, if_wrong: IfWrong) -> Judge<'_> {
        let answers = answers(self, if_wrong);
        Box::new(move |found| assert_allowed(self, &answers, &found[0], self.lse.then(|| &found[1])))
    }
}

/// Check a call under a name of its own, to be found by when it fails.
pub fn check_named(name: &str, call: &mut dyn Checked) -> Vec<Array> {
    call.case_mut().name = format!("{name}: {}", call.case().name);
    call.check()
}
