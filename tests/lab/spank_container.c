/*
 * A stand-in for pyxis in the test cluster: takes the --container-* flags of srun that the kit uses, and really runs each
 * task with the image as its root. Our own code, no part of pyxis or enroot.
 *
 * plugstack.conf:  required /path/spank_container.so images=/dir
 *
 * An image is a directory: a path, or a name looked up as images/NAME with / : # @ written as +. As in pyxis, the variables
 * in the image's /etc/environment win over the job's, but for those named by --container-env. Works for plain users by a user
 * namespace.
 *
 * gcc -shared -fPIC -O2 -Wall -o spank_container.so spank_container.c     (Debian: libslurm-dev, slurm-wlm-basic-plugins-dev)
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <slurm/spank.h>

SPANK_PLUGIN(container, 1)

enum { IMAGE, MOUNTS, WORKDIR, ENVS, NOPT };
static const struct {
	const char *name, *arg, *what;
} OPT[NOPT] = {
	[IMAGE] = {"container-image", "IMAGE|PATH", "image for the container filesystem"},
	[MOUNTS] = {"container-mounts", "SRC:DST[:FLAGS],...", "bind mounts inside the container"},
	[WORKDIR] = {"container-workdir", "PATH", "working directory inside the container"},
	[ENVS] = {"container-env", "NAME,...", "variables of the host that win over the image's"},
};
static char *val[NOPT];
static char images[PATH_MAX] = "/var/lib/slurm-images";
static char newroot[] = "/run/container/root"; /* in the mount namespace of the task alone */
static int ready;

static int die(const char *fmt, const char *a)
{
	char f[256];
	snprintf(f, sizeof f, "container: %s: %s", fmt, errno ? strerror(errno) : "refused");
	slurm_error(f, a);
	return -1;
}

/* SRC[:DST[:FLAGS]] with absolute paths */
static int bad_mounts(const char *v)
{
	char *copy = strdup(v), *save, *m;
	int bad = 0;
	for (m = strtok_r(copy, ",", &save); m; m = strtok_r(NULL, ",", &save)) {
		char *d = strchr(m, ':');
		if (*m != '/' || (d && d[1] != '/'))
			bad = 1;
	}
	free(copy);
	return bad;
}

static int on_opt(int o, const char *arg, int remote)
{
	if (!arg || !*arg || (o == WORKDIR && *arg != '/') || (o == MOUNTS && bad_mounts(arg))) {
		slurm_error("container: --%s: invalid argument: %s", OPT[o].name, arg ? arg : "");
		return -1;
	}
	free(val[o]);
	val[o] = strdup(arg);
	return 0;
}

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	for (int i = 0; i < ac; i++)
		if (!strncmp(av[i], "images=", 7))
			snprintf(images, sizeof images, "%s", av[i] + 7);
	if (spank_context() == S_CTX_SLURMD || spank_context() == S_CTX_JOB_SCRIPT)
		return 0;
	for (int i = 0; i < NOPT; i++) {
		struct spank_option o = {(char *)OPT[i].name, (char *)OPT[i].arg, (char *)OPT[i].what, 1, i, on_opt};
		if (spank_option_register(sp, &o) != ESPANK_SUCCESS)
			return die("cannot register --%s", OPT[i].name);
	}
	return 0;
}

/* the directories above p, then p itself as a directory or an empty file: what a bind mount needs to be there */
static void make_target(char *p, int file)
{
	for (char *s = p + 1; *s; s++)
		if (*s == '/') {
			*s = 0;
			mkdir(p, 0755);
			*s = '/';
		}
	if (!file)
		mkdir(p, 0755);
	else
		close(open(p, O_CREAT | O_WRONLY, 0644));
}

static int bind_to(const char *src, const char *dst, const char *flags)
{
	char t[PATH_MAX];
	struct stat st;
	if (stat(src, &st))
		return die("mount source %s", src);
	snprintf(t, sizeof t, "%s%s", newroot, dst);
	make_target(t, !S_ISDIR(st.st_mode));
	if (mount(src, t, NULL, MS_BIND | MS_REC, NULL))
		return die("bind mount on %s", t);
	if (flags && strstr(flags, "ro") && mount(NULL, t, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL))
		return die("read-only %s", t);
	return 0;
}

static int find_image(char *out)
{
	struct stat st;
	char n[NAME_MAX];
	snprintf(n, sizeof n, "%s", val[IMAGE]);
	if (*n == '/') {
		snprintf(out, PATH_MAX, "%s", n);
	} else {
		for (char *s = n; *s; s++)
			if (strchr("/:#@", *s))
				*s = '+';
		snprintf(out, PATH_MAX, "%.3000s/%s", images, n);
	}
	return stat(out, &st);
}

/* a writable view of the image, with this machine's /proc, /sys, /dev, names and users, and a /tmp of its own */
static int make_root(const char *image)
{
	char o[PATH_MAX + 128], tmp[64];
	const char *std[] = {"/proc", "/sys", "/dev", "/etc/hosts", "/etc/resolv.conf", "/etc/passwd", "/etc/group"};
	struct stat st;
	if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
		return die("mount namespace for %s", image);
	mkdir("/run/container", 0755);
	if (mount("tmpfs", "/run/container", "tmpfs", 0, "mode=755"))
		return die("tmpfs for %s", image);
	mkdir("/run/container/up", 0755);
	mkdir("/run/container/work", 0755);
	mkdir(newroot, 0755);
	snprintf(o, sizeof o, "lowerdir=%s,upperdir=/run/container/up,workdir=/run/container/work", image);
	if (mount("overlay", newroot, "overlay", 0, o))
		return die("overlay for %s", image);
	snprintf(tmp, sizeof tmp, "%s/tmp", newroot);
	mkdir(tmp, 01777);
	if (mount("tmpfs", tmp, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777"))
		return die("tmpfs on %s", tmp);
	for (unsigned i = 0; i < sizeof std / sizeof *std; i++)
		if (!stat(std[i], &st) && bind_to(std[i], std[i], NULL))
			return -1;
	return 0;
}

static int is_kept(const char *name)
{
	char list[8192], word[4200];
	snprintf(list, sizeof list, ",%s,", val[ENVS] ? val[ENVS] : "");
	snprintf(word, sizeof word, ",%s,", name);
	return strstr(list, word) != NULL;
}

static void take_image_env(spank_t sp)
{
	char path[128], line[4096];
	snprintf(path, sizeof path, "%s/etc/environment", newroot);
	FILE *f = fopen(path, "r");
	while (f && fgets(line, sizeof line, f)) {
		char *value = strchr(line, '=');
		if (!value || *line == '#')
			continue;
		*value++ = 0;
		value[strcspn(value, "\n")] = 0;
		if (!is_kept(line))
			spank_setenv(sp, line, value, 1);
	}
	if (f)
		fclose(f);
}

int slurm_spank_task_init_privileged(spank_t sp, int ac, char **av)
{
	char image[PATH_MAX], *save, *m;
	if (!val[IMAGE])
		return 0;
	errno = 0;
	if (find_image(image)) {
		slurm_error("container: no such image: %s", val[IMAGE]);
		return -1;
	}
	if (make_root(image))
		return -1;
	for (m = val[MOUNTS] ? strtok_r(val[MOUNTS], ",", &save) : NULL; m; m = strtok_r(NULL, ",", &save)) {
		char *d = strchr(m, ':'), *f = NULL;
		if (d) {
			*d++ = 0;
			if ((f = strchr(d, ':')))
				*f++ = 0;
		}
		if (bind_to(m, d ? d : m, f))
			return -1;
	}
	take_image_env(sp);
	ready = 1;
	return 0;
}

static int put(const char *file, const char *text)
{
	int fd = open(file, O_WRONLY | O_CLOEXEC), rc = fd < 0 || write(fd, text, strlen(text)) < 0;
	if (fd >= 0)
		close(fd);
	return rc;
}

/* as the user, before the task starts */
int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	char uid_map[64], gid_map[64];
	uid_t u = geteuid();
	gid_t g = getegid();
	if (!ready)
		return 0;
	errno = 0;
	if (u) { /* chroot needs a capability: from a user namespace in which the user is itself */
		snprintf(uid_map, sizeof uid_map, "%u %u 1", u, u);
		snprintf(gid_map, sizeof gid_map, "%u %u 1", g, g);
		prctl(PR_SET_DUMPABLE, 1); /* else /proc/self belongs to root after the change of user */
		if (unshare(CLONE_NEWUSER) || put("/proc/self/setgroups", "deny") || put("/proc/self/uid_map", uid_map) ||
		    put("/proc/self/gid_map", gid_map))
			return die("user namespace for %s", newroot);
	}
	if (chroot(newroot) || chdir(val[WORKDIR] ? val[WORKDIR] : "/"))
		return die("chroot into %s", newroot);
	return 0;
}
