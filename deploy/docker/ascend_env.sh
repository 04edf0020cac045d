# Set CANN's environment variables, if CANN is installed. Sourced by bash, because CANN's scripts need bash. The driver
# is mounted when the container starts.
LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64/driver:/usr/local/Ascend/driver/lib64/common:/usr/local/Ascend/driver/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
for pdserve_env in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/cann/set_env.sh \
    /usr/local/Ascend/nnal/atb/set_env.sh; do
    # CANN's scripts read variables that are not set, and run commands that may fail.
    if [ -f "$pdserve_env" ]; then
        case $- in
            *u*) set +u; . "$pdserve_env" || :; set -u ;;
            *) . "$pdserve_env" || : ;;
        esac
    fi
done
unset pdserve_env
