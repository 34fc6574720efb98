package boxhost

import (
	"strings"
	"testing"
)

func TestHelloFromABox(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	id := f.put(nil)
	out := f.sh(id, "id; pwd; echo $PATH; cat /proc/self/status | grep -E 'Cap|NoNew|Seccomp|Groups'; ls -la / /dev /workspace /home/agent; cat /proc/mounts; ls /sys; hostname; cat /proc/1/cmdline; ulimit -n")
	t.Log(out)
	if !strings.Contains(out, "uid=1000(agent)") {
		t.Error("no")
	}
}
